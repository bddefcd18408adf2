"""The user's request: the run, its strict loading, and errors that name the knob to turn."""
