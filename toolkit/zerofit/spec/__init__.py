"""The user's request (run, cluster), its strict loading, and errors."""
