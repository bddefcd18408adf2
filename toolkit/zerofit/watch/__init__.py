"""Supervises running ranks: a guard process for each rank, a server for all guards, and the verdict on failures."""
