"""Optimizers and ZeRO features: one entry each, which all folders of the package read. Needs no torch."""
