"""How mesh axes cut operands: knows meshes, and nothing of FP8."""
