"""Turns a run and a layout into the engine's DeepSpeed JSON, and finds all conflicts before a rank starts."""
