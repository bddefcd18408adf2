"""Runs on many hosts: where ranks start, how they are supervised there, and files for schedulers."""
