"""Explain why a run ran out of memory or failed, from a log or a memory snapshot. Nothing here imports torch."""
