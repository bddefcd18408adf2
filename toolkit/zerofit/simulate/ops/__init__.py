"""Observe each op of a simulated rank: its storages, streams, FLOPs and collectives."""
