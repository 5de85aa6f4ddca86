"""Activation: what a gated MLP makes of gate and up, by name or as a ClampedSwiglu.

"silu"       h = silu(gate) * up, silu(x) = x / (1 + exp(-x)): SwiGLU
"gelu"       h = gelu(gate) * up, gelu(x) = x (1 + erf(x / sqrt(2))) / 2: GeGLU
"gelu_tanh"  likewise, gelu(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
"relu2"      h = max(gate, 0)^2 * up
"""

from __future__ import annotations

import dataclasses
import numbers
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from jax_fp8gemm._data import checks

_NAMES = ("silu", "gelu", "gelu_tanh", "relu2")


@dataclass(frozen=True)
class ClampedSwiglu:
    """SwiGLU whose gate is bounded above, and whose up is bounded on both sides::

        gate' = min(gate, limit)
        up'   = min(max(up, -limit), limit)
        h     = gate' * sigmoid(alpha * gate') * (up' + up_offset)

    A gate or an up beyond its bound has the gradient zero; one that equals its bound has that of
    the formula without bounds. Frozen and hashable, so it may be a static argument. Each set of
    values has kernels of its own.

    DeepSeek-V4 is ClampedSwiglu(10.0) (its `swiglu_limit`). gpt-oss is ClampedSwiglu(7.0, 1.702,
    1.0); its checkpoints interleave the columns of gate and up, and those must be sorted into
    gate | up first.

    Attributes:
      limit: the bound, above 0.
      alpha: the factor of the gate in the sigmoid.
      up_offset: what is added to up.
    Raises:
      TypeError: an attribute that is no real number.
      ValueError: an attribute that is not finite in f32, or a limit that is not above 0 there.
    """

    limit: float
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            got = checks.short_repr(value)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"ClampedSwiglu: {field.name} must be a real number; got {got}")
            if not abs(float(value)) <= float(np.finfo(np.float32).max):
                raise ValueError(f"ClampedSwiglu: {field.name} must be finite in f32; got {got}")
        if not np.float32(self.limit) > 0:
            got = checks.short_repr(self.limit)
            raise ValueError(f"ClampedSwiglu: limit must be above 0 in f32; got {got}")


Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu2"] | ClampedSwiglu


def check_activation(op: str, activation: Any) -> None:
    """Raises ValueError unless `activation` is one."""
    is_name = isinstance(activation, str) and activation in _NAMES
    if not is_name and not isinstance(activation, ClampedSwiglu):
        names = ", ".join(map(repr, _NAMES))
        raise ValueError(
            f"{op}: activation must be {names} or a moe.ClampedSwiglu; "
            f"got {checks.short_repr(activation)}"
        )
