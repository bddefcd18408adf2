"""The commands as Python functions: they accept requests, return results, report events."""
