"""Comparisons of strategies, batch sizes and numbers of ranks, each row in own processes."""
