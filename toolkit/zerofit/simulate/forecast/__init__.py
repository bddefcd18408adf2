"""Forecast a whole run: simulate some of its ranks, and decide whether they fit."""
