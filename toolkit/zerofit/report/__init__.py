"""Draw pictures and write pages about runs, simulations, plans, trials and comparisons."""
