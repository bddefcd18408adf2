"""Find the fastest configuration that fits by measuring a few: learn from trials, and choose the next one."""
