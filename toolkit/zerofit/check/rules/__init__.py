"""Rules about values and their combinations: YAML entries (README.md), and functions for rules that need a loop."""
