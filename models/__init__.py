"""Model definitions and the catalog of names, and changes of models for training."""
