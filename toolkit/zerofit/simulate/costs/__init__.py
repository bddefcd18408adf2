"""Trace the costs of a model's layers without an engine: the profile that `zerofit plan` reads."""
