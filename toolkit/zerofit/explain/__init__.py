"""Explain an out-of-memory error from a log or a memory snapshot, on any machine: nothing here imports torch."""
