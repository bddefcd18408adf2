"""Everything that can be wrong in a DeepSpeed JSON, found before anything starts."""
