"""`--fit`: the layout of a run is chosen when it starts."""
