"""Classic ways to train in parallel, each a small readable file, measured on the same work."""
