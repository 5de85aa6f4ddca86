"""Looks inside a user's program: the walk through a jaxpr, and what explain and stats share."""
