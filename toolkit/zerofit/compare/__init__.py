"""Measurements of classic ways to train in parallel on the same task, one file each."""
