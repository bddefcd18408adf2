"""Checks hosts before ranks start on them: gathers facts of all hosts, compares them, and measures speeds."""
