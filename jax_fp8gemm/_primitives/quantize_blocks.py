"""quantize_blocks_p: quantises each block of a matrix, which the references of quantisers do.

In plain JAX it is _data/rounding.py. On a CPU it is one call of a function in C++ with the same
bits: XLA compiles a program the longer the more operations it has, and a model on a CPU quantises
hundreds of times. A CPU without the extension takes plain JAX, and so does an exported program,
which may run where the package is not installed.

The primitive stands below those of define_primitive, inside their references. A mesh has divided
the operand before, so there is no partition rule.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from jax_fp8gemm._data import rounding
from jax_fp8gemm._data.formats import SCALE_BLOCK
from jax_fp8gemm._data.kept_rounding import widened
from jax_fp8gemm._runtime import extension


def quantize_blocks(
    x: jax.Array, block_m: int, e5m2: bool, pow2_scale: bool, is_transposed: bool = False
) -> list[jax.Array]:
    """Quantises the matrices x (..., m, k), bf16, f16 or f32, or their transposes.

    Returns values (..., m, k), or (..., k, m) if is_transposed, and their scale, f32, one for each
    block of block_m x 128 values. block_m is 1 or 128.
    """
    return _quantize_blocks_p.bind(
        x,
        is_square=block_m == SCALE_BLOCK,
        is_transposed=is_transposed,
        e5m2=e5m2,
        pow2_scale=pow2_scale,
    )


def _abstract_eval(x, *, is_square: bool, is_transposed: bool, e5m2: bool, pow2_scale: bool):
    *batch, m, k = x.shape
    rows, columns = (k, m) if is_transposed else (m, k)
    types = rounding.block_types(rows, columns, SCALE_BLOCK if is_square else 1, e5m2, batch)
    return [x.update(shape=t.shape, dtype=t.dtype, weak_type=False) for t in types]


def _in_plain_jax(x, *, is_square: bool, is_transposed: bool, e5m2: bool, pow2_scale: bool):
    if x.ndim > 2:
        how = dict(is_square=is_square, is_transposed=is_transposed)
        return jax.vmap(partial(_in_plain_jax, **how, e5m2=e5m2, pow2_scale=pow2_scale))(x)
    x = widened(x)
    block_m = SCALE_BLOCK if is_square else 1
    return rounding.quantize_blocks(x.T if is_transposed else x, block_m, e5m2, pow2_scale)


def _batch(operands, dims, **params):
    results = _quantize_blocks_p.bind(jnp.moveaxis(operands[0], dims[0], 0), **params)
    return results, [0] * len(results)


_lower_plain = mlir.lower_fun(_in_plain_jax, multiple_results=True)
_lower_call = jax.ffi.ffi_lowering(extension.QUANTIZE_BLOCKS_TARGET)


def _lower_for_cpu(ctx, x, **params):
    # Plain JAX runs everywhere, so it is also for a JAX that does not say whether it exports.
    is_exported = getattr(ctx.module_context.lowering_parameters, "for_export", True)
    has_call = extension.has_cpu_targets and not is_exported
    return (_lower_call if has_call else _lower_plain)(ctx, x, **params)


_quantize_blocks_p = Primitive(extension.QUANTIZE_BLOCKS_TARGET)
_quantize_blocks_p.multiple_results = True
_quantize_blocks_p.def_abstract_eval(_abstract_eval)
_quantize_blocks_p.def_impl(partial(xla.apply_primitive, _quantize_blocks_p))
batching.primitive_batchers[_quantize_blocks_p] = _batch
mlir.register_lowering(_quantize_blocks_p, _lower_plain)
mlir.register_lowering(_quantize_blocks_p, _lower_for_cpu, platform="cpu")
