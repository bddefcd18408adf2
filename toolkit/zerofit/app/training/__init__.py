"""`zerofit train`: the memory gate, the run folder, and the ranks of a training until they end."""
