"""Turns a run and a layout into the engine's DeepSpeed JSON.

All conflicts are found before a rank starts.
"""
