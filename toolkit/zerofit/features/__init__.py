"""Optimizers and ZeRO features: each has one entry, which all rooms read. Needs no torch."""
