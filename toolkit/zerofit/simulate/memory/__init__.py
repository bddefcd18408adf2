"""Record the allocations of a simulated rank, and replay them through torch's caching allocator."""
