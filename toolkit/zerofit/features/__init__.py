"""Optimizers and ZeRO features, one entry each. All folders of the package read them, without torch."""
