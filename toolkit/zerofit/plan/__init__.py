"""Forecast memory and time of layouts from a stored profile, and search for the best."""
