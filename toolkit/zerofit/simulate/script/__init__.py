"""Run a user's unmodified script as one rank, with real host and fake device tensors."""
