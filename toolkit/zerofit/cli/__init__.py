"""The command line: `zerofit COMMAND`. Commands import what they need when they run, so --help is instant."""
