"""The configs of gated products, whose result is h = act(gate) * up of the product, quantised."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._tuning import quantize_config, tile_config

# A thread holds gate and up of the same elements. h needs one slab, which leaves shared memory for
# one stage more than TILE_128X256 has.
TILE_GATED = dataclasses.replace(tile_config.TILE_128X256, num_stages=4, num_slabs=1)


def attributes(
    num_sms: int,
    *,
    lhs_e5m2: bool,
    rhs_e5m2: bool,
    e5m2: bool,
    pow2_scale: bool,
    activation: Activation = "silu",
) -> dict[str, np.int32]:
    """Returns the attribute `config` of a call. e5m2, pow2_scale: how h is quantised."""
    of_activation = quantize_config.activation_attributes(activation)
    return TILE_GATED.attributes(
        dict(gated=True, h_e5m2=e5m2, h_pow2_scale=pow2_scale, **of_activation),
        is_1d1d=False,
        lhs_e5m2=lhs_e5m2,
        rhs_e5m2=rhs_e5m2,
        out_f32=False,
        accumulate=False,
        num_sms=num_sms,
        grouping=tile_config.GROUPED_ROWS,
    )
