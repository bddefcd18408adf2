"""Model definitions and the catalogue of names, and changes of models for training."""
