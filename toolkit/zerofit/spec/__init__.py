"""The user's request (run and cluster), strict loading of its files, and errors."""
