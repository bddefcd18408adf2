"""`--fit`: zerofit chooses the layout of a run when the run starts."""
