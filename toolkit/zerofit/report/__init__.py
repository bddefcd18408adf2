"""Draw pictures and write pages about runs, simulations, tunings and comparisons."""
