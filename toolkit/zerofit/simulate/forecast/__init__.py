"""Forecast a whole run: which ranks to simulate, in which processes, and whether they fit."""
