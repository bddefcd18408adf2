"""DeepSpeed JSON files that a user can take as they are; README.md says when to take which."""
