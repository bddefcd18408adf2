"""Planning: which layouts of a model fit a cluster, and how fast they run."""
