"""Define models and the catalog of their names, and change models for training."""
