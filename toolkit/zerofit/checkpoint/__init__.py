"""Checkpoints as files: what they hold, whether they are whole, and what they can be turned into; no engine."""
