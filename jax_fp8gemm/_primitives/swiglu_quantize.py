"""swiglu_quantize_p, swiglu_grad_quantize_p: quantise SwiGLU and its gradient as they compute them.

For gate_up (m, 2 f) = [gate, up] and the cotangent dh (m, f) of the result h (m, f), in f32:

    sigma = 1 / (1 + exp(-gate))
    silu  = gate * sigma
    h     = silu * up
    dgate = (dh * up) * (sigma + silu * (1 - sigma))
    dup   = dh * silu

gate_up and [dgate, dup] may be laid out in pieces (gated.py). h has its features in order, whatever
the pieces. Kernels read and write one piece. Where a device has several, XLA sorts gate_up before
and the FP8 results after: on a mesh make as many pieces as devices that the features are cut over.

In spite of their names they take every gated activation: gated.py has the others in the place of
silu. h and [dgate, dup] (m, 2 f) are quantised from these f32 values, as rows and as ragged columns
(quantize_ragged.py). They are never stored unquantised. Without groups all rows are tokens of one
group, and the columns are those of quantize.py, padded.

The last bits of the f32 values depend on the implementation: on its exp, and on where it fuses
products and sums. Their quantisation is exact. The kernel computes the same values in every mode,
and the emulation computes those values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks, groups
from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.formats import SCALE_BLOCK
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._emulation import gated as emulated
from jax_fp8gemm._primitives import modes, swiglu_mesh
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._primitives.gated import gated, gated_grad, in_pieces, without_pieces
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs, bind_in_mode, keep_used_axes
from jax_fp8gemm._primitives.quantize_ragged import call_kernel, reference, result_types
from jax_fp8gemm._runtime import extension

# The dtypes that a product returns.
_INPUT_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


@jax.named_scope("fp8gemm_swiglu_quantize")
def swiglu_quantize(
    gate_up: jax.Array,
    *of_groups: jax.Array,
    activation: Activation = "silu",
    pieces: int = 1,
    with_columns: bool,
    column_block: tuple[int, int] = (1, SCALE_BLOCK),
    **args: Unpack[QuantizeArgs],
) -> tuple[ScaledArray, ScaledArray | None]:
    """Quantises h, computed from gate_up (m, 2 f).

    Returns rows (m, f), and columns (f, t) along the tokens of each group or, unless with_columns,
    None. of_groups are group_sizes and first_row; without them all rows are one group. On a GPU a
    row of no group may hold anything, NaN too. activation says what h is, and pieces how gate_up is
    laid out: each has whole scale blocks of features. The other arguments are those of
    rows_and_ragged_columns.
    """
    operands = gate_up, *of_groups
    bind = partial(swiglu_quantize_p, activation=activation, pieces=pieces)
    mode = modes.of_columns(column_block, with_rows=True) if with_columns else "row"
    return _rows_and_columns(bind, operands, mode, args)


@jax.named_scope("fp8gemm_swiglu_grad_quantize")
def swiglu_grad_quantize(
    gate_up: jax.Array,
    dh: jax.Array,
    *of_groups: jax.Array,
    activation: Activation = "silu",
    pieces: int = 1,
    with_columns: bool,
    **args: Unpack[QuantizeArgs],
) -> tuple[ScaledArray, ScaledArray | None]:
    """Quantises [dgate, dup], computed from gate_up (m, 2 f) and dh (m, f).

    Returns rows (m, 2 f) and columns (2 f, t), as swiglu_quantize does, in the pieces of gate_up.
    """
    operands = gate_up, dh, *of_groups
    bind = partial(swiglu_grad_quantize_p, activation=activation, pieces=pieces)
    return _rows_and_columns(bind, operands, "row_column" if with_columns else "row", args)


def _rows_and_columns(
    bind: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    mode: str,
    args: QuantizeArgs,
) -> tuple[ScaledArray, ScaledArray | None]:
    rows, *columns = bind_in_mode(bind, operands, mode, args)
    return rows, columns[0] if columns else None


def _split_operands(operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns gate_up and, for the gradient, dh; and group_sizes and first_row, or nothing."""
    num_arrays = 2 - len(operands) % 2
    return operands[:num_arrays], operands[num_arrays:]


def _shape_rule(
    op: str,
    *operands,
    mode: str,
    e5m2: bool,
    pow2_scale: bool,
    activation: Activation,
    pieces: int = 1,
):
    (gate_up, *dh), of_groups = _split_operands(operands)
    checks.check_ndim(op, "gate_up", gate_up, 2, "(m, 2 f)")
    checks.check_dtype(op, "gate_up", gate_up, _INPUT_DTYPES)
    if of_groups:
        groups.check_group_sizes(op, of_groups[0])
    m, n = gate_up.shape
    if n % 2:
        raise ValueError(
            f"{op}: gate_up must be (m, 2 f); got gate_up {checks.short_type(gate_up)}"
        )
    expected = checks.short_type(jax.ShapeDtypeStruct((m, n // 2), gate_up.dtype))
    if dh and checks.short_type(dh[0]) != expected:
        raise ValueError(f"{op}: dh must be {expected}; got {checks.short_type(dh[0])}")
    num_groups = of_groups[0].shape[0] if of_groups else None
    return result_types(m, n if dh else n // 2, num_groups, mode, e5m2)


def _on_pieces(run: Callable[..., Sequence[jax.Array]], *operands, pieces: int, **params):
    """Runs `run`, which reads [gate | up], on a gate_up that is laid out in pieces."""
    gate_up, *others = operands
    results = run(without_pieces(gate_up, pieces, 1), *others, **params)
    if len(_split_operands(operands)[0]) == 1:
        return results
    rows, columns = modes.split(params["mode"])
    dims = [1, 1] * (rows is not None) + [0, 0] * (columns is not None)
    return [in_pieces(x, pieces, dim) for x, dim in zip(results, dims, strict=True)]


def _reference(function: Callable[..., jax.Array], *operands, activation: Activation, **params):
    arrays, of_groups = _split_operands(operands)
    return reference(function(*arrays, activation), *of_groups, **params)


def _ffi_call(target: str, source: str, function: Callable[..., jax.Array], *operands, **params):
    arrays, of_groups = _split_operands(operands)
    if arrays[0].size == 0:
        return _reference(function, *operands, **params)
    m = arrays[0].shape[0]
    sizes, first_row = of_groups or (jnp.full((1,), m, jnp.int32), jnp.zeros((1,), jnp.int32))
    types = _shape_rule(target, *arrays, sizes, first_row, **params)
    of_rows: dict[str, Any] = dict(has_ragged_rows=bool(of_groups)) | params
    return call_kernel(target, source, arrays, (sizes, first_row), types, **of_rows)


def _of_pieces(run, *args) -> Callable[..., Sequence[jax.Array]]:
    return partial(_on_pieces, partial(run, *args))


def _define(
    target: str,
    source: str,
    function: Callable[..., jax.Array],
    emulated_function: Callable[..., jax.Array],
) -> Callable[..., Sequence[jax.Array]]:
    return define_primitive(
        target,
        partial(_shape_rule, target.removeprefix("jax_fp8gemm_")),
        Forms(
            _of_pieces(_reference, function),
            _of_pieces(_ffi_call, target, source, function),
            _of_pieces(_reference, emulated_function),
        ),
        dce_rule=keep_used_axes,
        mesh_rules=MeshRules(swiglu_mesh.partition_rule, swiglu_mesh.run_shard),
    )


swiglu_quantize_p = _define(extension.SWIGLU_QUANTIZE_TARGET, "swiglu", gated, emulated.gated)
swiglu_grad_quantize_p = _define(
    extension.SWIGLU_GRAD_QUANTIZE_TARGET, "swiglu_grad", gated_grad, emulated.gated_grad
)
