"""Comparisons of strategies, batch sizes and numbers of ranks, each row measured in separate processes."""
