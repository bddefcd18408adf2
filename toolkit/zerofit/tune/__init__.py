"""Search for the fastest configuration that fits. Each trial helps to choose the next, so few trials are needed."""
