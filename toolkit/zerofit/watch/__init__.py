"""While ranks run: a guard beside each, one watch over all of them, and the verdict when something goes wrong."""
