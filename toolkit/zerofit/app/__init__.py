"""The commands as Python functions. They accept request objects, return results and report events."""
