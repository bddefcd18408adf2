"""The fastest configuration that fits, found by measuring few: what is known of candidates, and which one is next."""
