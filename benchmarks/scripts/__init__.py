"""Training scripts as users write them; none knows of a simulation."""
