"""quantize_weight: quantises a weight once for many products, and keeps it for its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, DTYPES, Recipe
from jax_fp8gemm._ops.product_spec import check_recipe
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm._sharding.explicit_axes import fold
from jax_fp8gemm._sharding.manual_axes import settle

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.named_scope("fp8gemm_quantize_weight")
def quantize_weight(
    w: Float[Array, ...],
    *,
    contracting: int | Sequence[int] | None = None,
    recipe: Recipe | str = DEEPSEEK_V3,
    implementation: Implementation = None,
) -> QuantizedWeight:
    """Quantises a weight once, for all products until it changes: one step of an optimiser, say.

    A product takes the result as its rhs, and does not quantise it again. Results and gradients
    have the bits that they have for `w`. The gradient of the result, or of `w` if this function is
    differentiated, is that of `w`; rounding to FP8 counts as the identity, as in the products::

        def step(params, batches):  # params["w"]: (k, n)
            params = jax.tree.map(quantize_weight, params)

            def add(total, batch):
                grads = master_weights(jax.grad(loss)(params, batch))
                return jax.tree.map(jnp.add, total, grads), None

            return jax.lax.scan(add, zeros, batches)[0]

    Args:
      w: (..., k, n) bf16, f16 or f32: matrices for matmul, or those of groups or of experts. With
        `contracting`, a weight of any rank above 1.
      contracting: the dimensions that products contract, in their order: 0 for the kernel
        (d, heads, features) of a projection, (0, 1) for the kernel (heads, features, d) of its
        counterpart. The others are free. A product may contract those instead, as one with the
        transposed weight. Map a function over leading dimensions with jax.vmap.
      recipe: that of the products. Of its fields, `fwd`, `rhs_block` and `pow2_scale` matter. A
        recipe without FP8 quantises nothing.
      implementation: as for `quantize`.
    Returns:
      A QuantizedWeight. In FP8 it holds one byte for each element, both as they are and transposed,
      beside `w` itself.
    Raises:
      TypeError: the dtype of w, contracting or recipe is wrong.
      ValueError: the rank of w, contracting or implementation is wrong.
      RuntimeError: implementation="cuda", and the kernel cannot run.

    On a mesh the result is sharded as `w` is, where its shards hold whole blocks. In a shard_map
    `w` is the shard of a device.
    """
    op = "quantize_weight"
    w = arrays.as_array(w)
    checks.check_array(op, "w", w)
    checks.check_dtype(op, "w", w, formats.FLOAT_DTYPES)
    checks.check_min_ndim(op, "w", w, 2, "(..., k, n)")
    recipe = check_recipe(op, recipe)
    checks.check_implementation(op, implementation)
    dims, num_batch = _contracting(op, w, contracting)
    pair = QuantizedWeight(jnp.asarray(w), None, recipe, dims)
    if recipe.fwd is None:
        return pair
    batch = range(-w.ndim, num_batch - w.ndim)
    free = [d for d in range(num_batch - w.ndim, 0) if d not in dims]
    matrices = fold(settle(op, lax.stop_gradient(pair.weight)), *([d] for d in batch), dims, free)
    scaled = quantize(
        matrices,
        block=recipe.rhs_block,
        dtype=DTYPES[recipe.fwd],
        pow2_scale=recipe.pow2_scale,
        with_transpose=True,
        implementation=implementation,
    )
    return replace(pair, scaled=scaled)


def _contracting(op: str, w: Any, contracting: Any) -> tuple[tuple[int, ...], int]:
    """Returns the contracting dimensions, counted from the end, and how many lead as a batch."""
    if contracting is None:
        return (-2,), w.ndim - 2
    checks.check_static(op, contracting=contracting)
    given = contracting if isinstance(contracting, tuple | list) else (contracting,)
    dims = [checks.as_index(d) for d in given]
    got = f"got {checks.short_repr(contracting)}, w {checks.short_type(w)}"
    if None in dims:
        raise TypeError(f"{op}: contracting must be None, an int or several; {got}")
    found = tuple(d if d < 0 else d - w.ndim for d in dims if d is not None)
    if not all(-w.ndim <= d < 0 for d in found) or len(set(found)) != len(found):
        raise ValueError(f"{op}: contracting must name dimensions of w, each once; {got}")
    if not 0 < len(found) < w.ndim:
        raise ValueError(
            f"{op}: contracting must leave a dimension of w, and name at least one; {got}"
        )
    return found, 0
