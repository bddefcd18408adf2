"""Any user's training script, unmodified, as one rank of N: host tensors are real, what is on the device is fake."""
