"""Model definitions and catalogue: names to sources, sources to modules, and what training changes in them."""
