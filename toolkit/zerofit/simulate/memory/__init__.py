"""Record a simulated rank's allocations, and replay them in torch's caching allocator."""
