"""What the user asks for: the run, its strict loading, and errors that name the knob to turn."""
