"""Recipe: which FP8 formats and scale blocks a differentiable product uses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import jax.numpy as jnp

from jax_fp8gemm._runtime.html_table import html_table

Format = Literal["e4m3", "e5m2"]
DTYPES = {"e4m3": jnp.dtype(jnp.float8_e4m3fn), "e5m2": jnp.dtype(jnp.float8_e5m2)}
REDUCE_DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}


@dataclass(frozen=True)
class Recipe:
    """How differentiable products quantise: matmul and its kin, grouped products, those of moe.

    Frozen and hashable, so it may be a static argument.

    Attributes:
      fwd: format of lhs and rhs: "e4m3" or "e5m2". None: no FP8 anywhere, a plain XLA dot.
      bwd: format of the cotangent dout.
      lhs_block: scale block of lhs and dout along their contraction; only (1, 128).
      rhs_block: scale block of rhs; only (128, 128), whose transpose is exact, so fwd and dlhs use
        the same quantised weights.
      pow2_scale: round every scale up to a power of two.
      wgrad: how the gradient of rhs is computed. "fp8": from lhs and dout quantised along m.
        "bf16": from both in bf16; the residual is then lhs itself, in its own dtype.
      wgrad_lhs_block: scale block of lhs in the gradient of rhs: (1, 128) along m or, for weight
        gradients that are faster and a little less accurate, (128, 128).
      reduce_dtype: dtype of the partial sums that devices add where a mesh cuts the contraction of
        a quantised product. "f32", or "bf16": each device first rounds its own sum, and half the
        bytes travel. On one device it has no effect.
      kept_gate_up: how experts, and other gated MLPs, keep the input of their activation for the
        backward pass: "unquantised", or "fp8" with 1x128 scales (report, section 3.3.3), in about
        half the bytes. The result keeps its bits; gradients take one more rounding. Other products
        have no such input.
      fp8_combine: whether an expert-parallel layer sends results and the gradient of x back as FP8
        with 1x128 scales. Otherwise they travel in the dtype of x, as in DeepSeek-V3 (report,
        section 3.3.3).
      batch_invariant: whether what XLA computes beside the kernels has specified bits too, as the
        kernels have: the router and the sums of a layer on one device, and products without FP8,
        which then run in integers. No other row, nor the program around, changes a bit of a row
        (docs/numerics.md).
      split_k: whether dense products of up to 64 rows may add up a long contraction in parts, where
        the result has up to 1024 columns (docs/recipes.md). They are faster. A row then has other
        bits than among more rows, so it does not go with batch_invariant.
    Raises:
      ValueError: a field outside the values above, split_k with batch_invariant or without FP8,
        fp8_combine where nothing travels as FP8, kept_gate_up="fp8" where the activation is not
        fused with its quantisation, or square blocks of lhs where no gradient of rhs is computed
        from FP8.
    """

    fwd: Format | None = "e4m3"
    bwd: Format = "e4m3"
    lhs_block: tuple[int, int] = (1, 128)
    rhs_block: tuple[int, int] = (128, 128)
    pow2_scale: bool = False
    wgrad: Literal["fp8", "bf16"] = "fp8"
    wgrad_lhs_block: tuple[int, int] = (1, 128)
    reduce_dtype: Literal["f32", "bf16"] = "f32"
    kept_gate_up: Literal["unquantised", "fp8"] = "unquantised"
    fp8_combine: bool = False
    batch_invariant: bool = False
    split_k: bool = False

    def __post_init__(self) -> None:
        allowed = {
            "fwd": ("e4m3", "e5m2", None),
            "bwd": ("e4m3", "e5m2"),
            "lhs_block": ((1, 128),),
            "rhs_block": ((128, 128),),
            "pow2_scale": (False, True),
            "wgrad": ("fp8", "bf16"),
            "wgrad_lhs_block": ((1, 128), (128, 128)),
            "reduce_dtype": ("f32", "bf16"),
            "kept_gate_up": ("unquantised", "fp8"),
            "fp8_combine": (False, True),
            "batch_invariant": (False, True),
            "split_k": (False, True),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            # The type is compared too: an array would compare element by element, and has no hash.
            if not any(type(value) is type(known) and value == known for known in values):
                expected = " or ".join(map(repr, values))
                raise ValueError(f"Recipe: {name} must be {expected}; got {value!r}")
        needs_fp8 = {
            "fp8_combine": self.fp8_combine,
            "kept_gate_up='fp8'": self.kept_gate_up == "fp8",
            "wgrad_lhs_block=(128, 128)": self.wgrad_lhs_block != (1, 128),
        }
        for name, is_set in needs_fp8.items():
            if is_set and not self.is_fused:
                raise ValueError(
                    f"Recipe: {name} must go with an FP8 fwd and wgrad='fp8'; "
                    f"got fwd={self.fwd!r}, wgrad={self.wgrad!r}"
                )

        if self.split_k and (self.batch_invariant or not self.is_fp8):
            raise ValueError(
                "Recipe: split_k must go with an FP8 fwd and without batch_invariant; "
                f"got fwd={self.fwd!r}, batch_invariant={self.batch_invariant}"
            )

    def __repr__(self) -> str:
        """Returns the call that makes this recipe, without arguments that have their defaults."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Recipe({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def _repr_html_(self) -> str:
        return html_table(repr(self), [(f.name, repr(getattr(self, f.name))) for f in fields(self)])

    @property
    def is_fp8(self) -> bool:
        """Returns whether anything is quantised at all."""
        return self.fwd is not None

    @property
    def is_fused(self) -> bool:
        """Returns whether experts quantise activations as they compute them.

        Tokens of an expert-parallel layer then travel as FP8.
        """
        return self.is_fp8 and self.wgrad == "fp8"


# DeepSeek-V3 report, section 3.3: e4m3 everywhere, 1x128 activations, 128x128 weights.
DEEPSEEK_V3 = Recipe()
# e5m2 for cotangents: more range, one bit less of mantissa.
HYBRID = Recipe(bwd="e5m2")
# No FP8: lax.dot_general of the operands as they are. It is the baseline to compare with.
BF16 = Recipe(fwd=None)
# The recipes that an argument may name.
NAMED = {"deepseek_v3": DEEPSEEK_V3, "hybrid": HYBRID, "bf16": BF16}
