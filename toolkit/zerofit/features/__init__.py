"""Optimizers, ZeRO features and engines, one entry each, which all folders read."""
