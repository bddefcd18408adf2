"""What an optimizer and a ZeRO feature are: one entry each, which all rooms read. Needs no torch."""
