"""Run a user's unmodified training script as one rank of N: host tensors are real, device tensors are fake."""
