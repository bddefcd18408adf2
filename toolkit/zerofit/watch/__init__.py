"""Supervise running ranks: a guard process for each rank, a server for all guards, verdicts."""
