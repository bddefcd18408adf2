"""The state of hosts before ranks start on them: facts of each, asked in parallel and compared; measurements."""
