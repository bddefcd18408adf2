"""Check hosts before ranks start on them: gather facts, compare them, and measure speeds."""
