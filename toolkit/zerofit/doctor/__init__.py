"""The state of hosts before ranks start on them: facts of all hosts, compared with each other, and measurements."""
