"""What each family measures."""
