"""The command line: `zerofit COMMAND`. A command imports what it needs only when it runs, so --help is instant."""
