"""`zerofit simulate`: the memory and the trace of a run or of a script, without a GPU."""
