"""What only a GPU can show, ready for the half hour in which there is one; see README.md."""
