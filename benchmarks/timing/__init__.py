"""How a call is timed."""
