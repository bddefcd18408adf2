"""Forecast the memory of an inference engine.

The engine runs alone (`plan --serve`) or with a trainer (`plan --method`).
"""
