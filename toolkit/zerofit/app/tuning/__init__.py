"""Tuning: short real runs of the configurations that should fit, and the files of the fastest."""
