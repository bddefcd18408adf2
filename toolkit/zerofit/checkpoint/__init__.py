"""Checkpoints as files: contents, verification, export and conversion, without an engine."""
