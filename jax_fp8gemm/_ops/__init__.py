"""Operations that users call: checked, most of them differentiable."""
