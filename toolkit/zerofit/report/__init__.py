"""Draw pictures and write pages about runs, simulations, plans, trials of tune, and comparisons."""
