"""Turns a run and a layout into the engine's JSON. Finds conflicts before a rank starts."""
