"""Measures classic ways to train in parallel on the same task. Each way is a small, readable file."""
