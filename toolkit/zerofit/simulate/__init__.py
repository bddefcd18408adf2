"""Run the real DeepSpeed engine as one rank of N on fake tensors, to see what it allocates, sends and computes."""
