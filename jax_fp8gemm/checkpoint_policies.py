"""Policies of jax.checkpoint that know the products of this package. docs/remat.md compares them.

JAX's own dots_saveable looks for its own primitives. It saves nothing of ours, and the backward
pass then computes each forward product again. Each policy here is a function, as those of
jax.checkpoint_policies are, and jax.checkpoint_policies.save_from_both_policies joins two.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive

from jax_fp8gemm._ops.product_spec import CHECKPOINT_NAMES
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.gemm_dims import num_batch_dims

_LHS, _RHS, _OUT = CHECKPOINT_NAMES
_jax = jax.checkpoint_policies

save_products = _jax.save_only_these_names(_OUT)
"""Saves results of our products."""

save_quantized = _jax.save_only_these_names(_LHS, _RHS)
"""Saves what our products keep for their gradients, which is FP8 and scales of both operands.
Results that the backward pass of other ops needs are computed again."""

dots_saveable = _jax.save_from_both_policies(_jax.dots_saveable, save_products)
"""Saves what JAX's policy of this name saves, and results of our products."""


def _is_product_without_batch_dims(primitive: Primitive, *operands: Any, **params: Any) -> bool:
    if primitive.name == "jax_fp8gemm_gemm":
        return num_batch_dims(operands[2], params["num_k_dims"]) == 0
    return primitive.name in ("jax_fp8gemm_grouped_gemm", "jax_fp8gemm_grouped_wgrad")


dots_with_no_batch_dims_saveable = _jax.save_from_both_policies(
    _jax.dots_with_no_batch_dims_saveable, _is_product_without_batch_dims
)
"""Saves what JAX's policy of this name saves, and results of our products that have no batch
dimensions. A group of rows is none."""

# What may stand between a weight and its quantisation. Each takes little to compute again.
_PARTS_OF_ARRAYS = ("slice", "dynamic_slice", "squeeze", "reshape", "transpose")
_SHARDINGS = ("sharding_constraint", "reshard", "pvary")
_STEPS_OF_WEIGHTS = (*_PARTS_OF_ARRAYS, *_SHARDINGS, "convert_element_type")


def save_all_but_weights(primitive: Primitive, *operands: Any, **params: Any) -> bool:
    """Saves what is saved without jax.checkpoint, but for quantised weights. The backward pass
    quantises them again. It also repeats casts, slices, transpositions and changes of a sharding,
    through which a weight may have come."""
    if primitive.name == "name":
        return params["name"] != _RHS
    if primitive.name == "jax_fp8gemm_quantize":
        return params["mode"] not in modes.SQUARE
    return primitive.name not in _STEPS_OF_WEIGHTS
