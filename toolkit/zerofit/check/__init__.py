"""Checks of a DeepSpeed JSON: everything that can be wrong in it, found before anything starts."""
