"""JAX primitives of quantised operands: unchecked, one file each."""
