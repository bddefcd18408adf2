"""The rules about values and their combinations, one file a subject; `RULES` in `table.py` lists them all."""
