"""The real DeepSpeed engine as one rank of N on fake tensors: what it allocates, sends and computes."""
