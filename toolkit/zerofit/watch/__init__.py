"""Supervision of running ranks: a guard per rank, one watch over all of them, and the verdict on failures."""
