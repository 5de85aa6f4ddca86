"""How mesh axes cut the operands of an op. This folder knows meshes, and nothing of FP8."""
