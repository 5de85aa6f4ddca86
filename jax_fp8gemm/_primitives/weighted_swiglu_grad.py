"""weighted_swiglu_grad_quantize_p: the gradient of SwiGLU for rows with weights, and their dots.

For gate_up (m, 2 f), the cotangent dh (m, f) of h, and a weight for each row:

    [dgate, dup] = those of swiglu_quantize.py, for dh * weight
    dot          = sum over f of h * dh

dh * weight is rounded to the dtype of dh. An expert-parallel layer receives dout without the
weights of choices, so its dh has none either. dot is then the gradient of a weight.

The dots are returned as sums over 128 features each, (f / 128, m). swiglu_weights.cuh says in which
order the kernel adds the terms of such a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.kept_rounding import widened
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._emulation import f32
from jax_fp8gemm._emulation import gated as emulated
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._primitives.gated import gated, gated_grad
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs, bind_in_mode
from jax_fp8gemm._primitives.quantize_ragged import call_kernel, reference, result_types
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.rule import PartitionRule

_OP = "weighted_swiglu_grad_quantize"
_INPUT_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
_FEATURES_OF_A_THREAD = 8


@jax.named_scope("fp8gemm_swiglu_grad_quantize")
def weighted_swiglu_grad_quantize(
    gate_up: jax.Array,
    dh: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    first_row: jax.Array,
    *,
    activation: Activation,
    with_columns: bool,
    **args: Unpack[QuantizeArgs],
) -> tuple[ScaledArray, ScaledArray | None, jax.Array]:
    """Quantises [dgate, dup] of dh * weights.

    Args:
      gate_up: (m, 2 f), bf16 or f32.
      dh: (m, f), of the same dtype.
      weights: (m,) f32.
      group_sizes, first_row: int32, as for ragged_columns.
      activation: that of gated.py.
      with_columns: whether columns are wanted.
      args: the FP8 dtype, pow2_scale and the implementation.
    Returns:
      rows (m, 2 f); columns (2 f, t) along the tokens of each group, or None; and the dots (m,)
      f32. On a GPU a row of no group and its dot may hold anything, NaN too.
    """
    found: list[jax.Array] = []

    def bind(*operands: jax.Array, **params: Any) -> Sequence[jax.Array]:
        *quantised, dots = weighted_swiglu_grad_quantize_p(
            *operands, activation=activation, **params
        )
        found.append(dots)
        return quantised

    operands = gate_up, dh, weights, group_sizes, first_row
    rows, *columns = bind_in_mode(bind, operands, "row_column" if with_columns else "row", args)
    return rows, columns[0] if columns else None, jnp.sum(found[0], axis=0)


def _shape_rule(
    gate_up,
    dh,
    weights,
    group_sizes,
    first_row,
    *,
    mode: str,
    e5m2: bool,
    pow2_scale: bool,
    activation: Activation,
):
    checks.check_ndim(_OP, "gate_up", gate_up, 2, "(m, 2 f)")
    checks.check_dtype(_OP, "gate_up", gate_up, _INPUT_DTYPES)
    m, n = gate_up.shape
    if n % 2:
        raise ValueError(
            f"{_OP}: gate_up must be (m, 2 f); got gate_up {checks.short_type(gate_up)}"
        )
    f = n // 2
    for name, x, shape, dtype in (
        ("dh", dh, (m, f), gate_up.dtype),
        ("weights", weights, (m,), jnp.float32),
    ):
        expected = checks.short_type(jax.ShapeDtypeStruct(shape, dtype))
        if checks.short_type(x) != expected:
            raise ValueError(f"{_OP}: {name} must be {expected}; got {checks.short_type(x)}")
    _groups.check_group_sizes(_OP, group_sizes)
    num_blocks = formats.num_blocks(f)
    dots = jax.ShapeDtypeStruct((num_blocks, m), jnp.float32)
    return [*result_types(m, n, group_sizes.shape[0], mode, e5m2), dots]


def _dots(h: jax.Array, dh: jax.Array) -> jax.Array:
    """Returns the sums of h * dh over 128 features each, by XLA."""
    products = h * dh.astype(jnp.float32)
    products = jnp.pad(products, ((0, 0), (0, -h.shape[1] % formats.SCALE_BLOCK)))
    blocks = h.shape[0], formats.num_blocks(h.shape[1]), formats.SCALE_BLOCK
    return products.reshape(blocks).sum(axis=2).T


def _reference(gate_up, dh, weights, *of_groups, activation: Activation, **params):
    weighted = (dh.astype(jnp.float32) * weights[:, None]).astype(dh.dtype)
    quantised = reference(gated_grad(gate_up, weighted, activation), *of_groups, **params)
    return [*quantised, _dots(gated(gate_up, activation), dh)]


def _emulated_dots(h: jax.Array, dh: jax.Array) -> jax.Array:
    """The same in the kernel's order: of 8 features one after another, then of pairs of sums."""
    padding = (0, 0), (0, -h.shape[1] % formats.SCALE_BLOCK)
    num_threads = formats.SCALE_BLOCK // _FEATURES_OF_A_THREAD
    shape = h.shape[0], formats.num_blocks(h.shape[1]), num_threads, _FEATURES_OF_A_THREAD
    h, dh = (f32.to_bits(jnp.pad(widened(x), padding)).reshape(shape) for x in (h, dh))
    sums = jnp.zeros_like(h[..., 0])
    for feature in range(_FEATURES_OF_A_THREAD):
        sums = f32.fma(h[..., feature], dh[..., feature], sums)
    while sums.shape[2] > 1:
        first, second = jnp.split(sums, 2, axis=2)
        sums = f32.add(first, second)
    return f32.from_bits(sums[..., 0]).T


def _emulation(gate_up, dh, weights, *of_groups, activation: Activation, **params):
    weighted = f32.multiply(widened(dh), weights[:, None])
    if dh.dtype == jnp.bfloat16:
        weighted = f32.to_bfloat16(f32.to_bits(weighted))
    da = emulated.gated_grad(gate_up, weighted, activation)
    return [
        *reference(da, *of_groups, **params),
        _emulated_dots(emulated.gated(gate_up, activation), dh),
    ]


def _ffi_call(gate_up, dh, weights, group_sizes, first_row, **params):
    operands = gate_up, dh, weights, group_sizes, first_row
    if gate_up.size == 0:
        return _reference(*operands, **params)
    return call_kernel(
        extension.WEIGHTED_SWIGLU_GRAD_QUANTIZE_TARGET,
        "weighted_swiglu_grad",
        [gate_up, dh, weights],
        (group_sizes, first_row),
        _shape_rule(*operands, **params),
        has_ragged_rows=True,
        **params,
    )


def _dce_rule(used, *, mode: str, **params) -> tuple[dict[str, Any], Sequence[int]]:
    """Leaves the columns out where nobody reads them."""
    rows, columns = modes.split(mode)
    if columns and not any(used[2:4]):
        return dict(params, mode=rows), (0, 1, 4)
    return dict(params, mode=mode), range(len(used))


def _partition_rule(*_, mode: str, **params) -> PartitionRule:
    """No mesh axis cuts an operand. The rows come from copy_rows, and no axis cuts them there."""
    columns = ("w tokens",) * (2 if modes.split(mode)[1] else 0)
    return PartitionRule(
        ("t w", "t f", "t", "sizes", "first"),
        ("t w", "t w", *columns, "blocks t"),
        uncut=("t", "w", "f", "sizes", "first", "tokens", "blocks"),
    )


weighted_swiglu_grad_quantize_p: Callable[..., Sequence[jax.Array]] = define_primitive(
    extension.WEIGHTED_SWIGLU_GRAD_QUANTIZE_TARGET,
    _shape_rule,
    Forms(_reference, _ffi_call, _emulation),
    dce_rule=_dce_rule,
    mesh_rules=MeshRules(_partition_rule),
)
