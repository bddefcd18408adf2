"""The command line: `zerofit COMMAND`."""
