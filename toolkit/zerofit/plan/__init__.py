"""Forecast memory and time of layouts from a stored profile, and search them. Imports no torch."""
