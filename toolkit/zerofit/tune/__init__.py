"""Find the fastest configuration that fits with few measurements: each trial helps to choose the next trial."""
