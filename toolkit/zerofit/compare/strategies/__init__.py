"""Strategies, one per file: `train(work)` is all the code that a user would write."""
