"""Comparisons of strategies, batch sizes and numbers of ranks, each row measured in processes of its own."""
