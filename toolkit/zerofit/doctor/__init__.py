"""What hosts are like before ranks start on them: facts of each, asked in parallel and compared; measurements."""
