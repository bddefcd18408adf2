"""One file a strategy, written as one would in a lecture: `train(work)` is all that a user would write."""
