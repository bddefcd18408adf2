"""The commands' work without a terminal: typed requests in, typed results out, progress as events."""
