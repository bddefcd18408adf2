"""Supervision of running ranks: a guard per rank, one watch over all guards, and the verdict on failures."""
