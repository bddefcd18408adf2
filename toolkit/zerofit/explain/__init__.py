"""Explain why a run failed, from a log or a memory snapshot, without torch."""
