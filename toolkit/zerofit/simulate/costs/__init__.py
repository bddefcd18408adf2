"""Trace the costs of a model's layers without an engine.

The result is the profile for `zerofit plan`.
"""
