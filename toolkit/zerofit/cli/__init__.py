"""The command line: `zerofit COMMAND`. A command imports what it needs when it runs, so --help is instant."""
