"""`zerofit train`: the memory gate, the run folder, and the ranks of a run until they end."""
