"""What real runs on this machine allocate, to the byte."""
