"""Checks of a DeepSpeed JSON before a run starts."""
