"""Strategies, one per file, as in a lecture: `train(work)` is all the code that a user would write."""
