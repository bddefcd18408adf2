"""Rules about values and their combinations: YAML entries (README.md), and functions with loops."""
