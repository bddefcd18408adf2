"""Measure classic ways to train in parallel on the same work; each is a small, readable file."""
