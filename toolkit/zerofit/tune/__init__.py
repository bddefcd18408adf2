"""Search for the fastest configuration that fits: each trial helps to choose the next."""
