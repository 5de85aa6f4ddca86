"""What operands are: formats, argument checks, recipes, ScaledArray, groups of rows, rounding."""
