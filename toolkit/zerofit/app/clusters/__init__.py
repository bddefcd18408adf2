"""Runs on many hosts: where ranks start, how they are watched, and files for schedulers."""
