"""Starting ranks through the deepspeed launcher, and what becomes of them."""
