"""Memory and time of layouts from a stored profile, and the search over them; imports no torch."""
