"""What commands do, without a terminal: typed requests in, typed results out, progress as events."""
