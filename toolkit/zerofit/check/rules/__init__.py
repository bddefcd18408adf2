"""The rules about values and their combinations, one file per subject; `RULES` in `check.py` lists them all."""
