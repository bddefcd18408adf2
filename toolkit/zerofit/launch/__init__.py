"""Starting ranks through the deepspeed launcher, and the outcome of a start."""
