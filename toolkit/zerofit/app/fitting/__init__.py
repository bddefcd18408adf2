"""`--fit`: the layout of a run that is chosen where it starts."""
