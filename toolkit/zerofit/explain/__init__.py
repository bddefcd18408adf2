"""Explain an out-of-memory error from a log or a memory snapshot. Imports no torch: both are read on any machine."""
