"""Strategies, one per file, as in a lecture: `train(work)` is all that a user would write."""
