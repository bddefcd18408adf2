"""Record what a simulated rank allocates, and replay it through torch's caching allocator."""
