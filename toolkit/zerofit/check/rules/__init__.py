"""Rules about values and combinations: YAML entries (README.md), and functions with loops."""
