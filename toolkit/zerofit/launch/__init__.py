"""Start ranks on this machine, on many hosts or through a scheduler."""
