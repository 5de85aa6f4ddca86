"""What operands are: argument checks, recipes, ScaledArray, groups of rows, rounding to FP8."""
