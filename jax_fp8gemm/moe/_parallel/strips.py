"""Strips of columns, in which the results of a forward pass are computed and travel back.

A strip travels while the next one is computed. It has the bits that it has in the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.formats import SCALE_BLOCK
from jax_fp8gemm._data.groups import MAX_GROUPS, Groups
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._ops.grouped_products import grouped_gemm_as
from jax_fp8gemm.moe._biases import add_bias
from jax_fp8gemm.moe._mlp_products import Experts
from jax_fp8gemm.moe._mlp_specs import Specs
from jax_fp8gemm.moe._parallel.exchange_kinds import Exchange
from jax_fp8gemm.moe._parallel.parts import after

_NUM_STRIPS = 2
# Of a strip, from all other devices. Two GPUs of DeepSeek-V3's sizes have 59 MB, and lose by
# strips. Four have 176 MB, and gain.
_MIN_STRIP_BYTES = 100_000_000
# NCCL's kernel of an all_to_all has as many CTAs, on four H200s. With 24 multiprocessors left to
# it, or none, it began when the product ended.
_COLLECTIVE_SMS = 32


GiveBack: TypeAlias = Callable[[jax.Array], jax.Array]


class Strips(NamedTuple):
    """How a forward pass computes its results: in strips of columns, one after another.

    Attributes:
      number: of strips of equal width, a multiple of 128 if there are several.
      give_back: what is done with each strip; the product of the next one does not wait for it.
    """

    number: int = 1
    give_back: GiveBack = lambda sums: sums


WHOLE = Strips()


def count_strips(exchange: Exchange, num_experts: int, x: jax.Array) -> int:
    """Returns in how many strips of columns the results of tokens x (t, d) travel back.

    Each is whole scale blocks wide. In its product, each expert of a device has a group for each
    strip.
    """
    d = x.shape[1]
    num_bytes = (exchange.received - exchange.slots) * d * x.dtype.itemsize
    is_long = num_bytes >= _NUM_STRIPS * _MIN_STRIP_BYTES
    is_whole = d % (_NUM_STRIPS * SCALE_BLOCK) == 0
    return _NUM_STRIPS if is_long and is_whole and _NUM_STRIPS * num_experts <= MAX_GROUPS else 1


def down_product_in_strips(
    specs: Specs,
    h: ScaledArray,
    w: Experts,
    groups: Groups,
    strips: Strips,
    sums: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns what strips.give_back makes of sums(product), for the products of all strips.

    h: (m, f). w.down: transposed. sums: of the rows (m, columns) of a strip.
    """
    outs: list[jax.Array] = []
    before = ()
    for strip in range(strips.number):
        # XLA would compute all products first, and then all sums in one kernel.
        h = after(h, *before)
        product = _down_strip(specs, h, w, groups, strip, strips.number)
        # Nothing else then runs beside the strip before, or XLA would start that later.
        product = after(product, *outs[-1:])
        before = (sums(product),)
        outs.append(strips.give_back(*before))
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)


def _down_strip(
    specs: Specs, h: ScaledArray, w: Experts, groups: Groups, strip: int, num_strips: int
) -> jax.Array:
    """Returns strip number `strip` of out (m, d): d / num_strips columns, a multiple of 128.

    Each strip of an expert's weight is the weight of a group of its own, so no weight is copied.
    The groups of the other strips are empty. All strips but the first leave multiprocessors to the
    collective by which the strip before travels.
    """
    down = specs.down
    # Without -1, which an empty array leaves open.
    values, scale = (
        x.reshape(x.shape[0] * num_strips, x.shape[1] // num_strips, x.shape[2])
        for x in values_and_scale(w.down)
    )
    weights = ScaledArray(values, scale, block=w.down.block)
    is_strip = jnp.arange(num_strips, dtype=jnp.int32) == strip
    of_strip = groups._replace(sizes=jnp.where(is_strip, groups.sizes[:, None], 0).reshape(-1))
    of_out = down.shardings.out, specs.unused_rows, _COLLECTIVE_SMS if strip > 0 else 0
    out = grouped_gemm_as(down, down.out_dtype, h, weights, *of_strip, *of_out)
    if w.biases is None:
        return out
    return add_bias(out, jnp.split(w.biases.down, num_strips, axis=1)[strip], groups)
