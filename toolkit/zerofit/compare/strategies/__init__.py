"""Strategies as a lecture shows them, one per file: `train(work)` is all the code that a user would write."""
