"""Tuning: short real runs of the configurations that should fit, and files for the fastest."""
