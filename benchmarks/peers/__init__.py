"""Other implementations of the same products."""
