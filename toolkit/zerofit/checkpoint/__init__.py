"""Checkpoints as files: contents, verification, export and conversion. No engine is needed."""
