"""The lowest layer: the compiled extension, the environment, and what JAX may change."""
