"""MaxText's RoutedMoE, its grouped products ours, against the same layer on jax.lax.ragged_dot.

MaxText's wheel has the layer but no tests, so the cases are written here. Data are random, and what
goes into the second product is no integer: each has a tolerance of FP8.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import substitute

maxtext = pytest.importorskip("maxtext", reason="MaxText is installed by hand")
from jax.sharding import Mesh  # noqa: E402
from maxtext.configs import pyconfig  # noqa: E402
from maxtext.layers import moe  # noqa: E402
from maxtext.layers.initializers import nd_dense_init  # noqa: E402
from maxtext.utils import maxtext_utils  # noqa: E402

# Of the norm of the result. e4m3 rounds a value by 2.6% (root of the mean square of what is at most
# 2^-4), so a product of random data errs by sqrt(2) times that, and three products in a row, as in
# the layer or its gradient, by at most three times as much.
TOLERANCE = 3 * 2**0.5 * 0.026

SIZES = dict(
    base_emb_dim=256,
    base_mlp_dim=256,
    base_moe_mlp_dim=256,
    num_experts=4,
    num_experts_per_tok=2,
    max_target_length=64,
    override_model_config=True,
)


def layer_and_inputs(dtype: str, **options):
    config = pyconfig.initialize(
        [None, str(Path(maxtext.__path__[0], "configs", "base.yml"))],
        run_name="conformance",
        enable_checkpointing=False,
        dtype=dtype,
        megablox=False,
        sparse_matmul=True,
        per_device_batch_size=1,
        float32_gate_logits=True,
        **SIZES,
        **options,
    )
    layer = moe.get_routed_moe(
        name="MoeBlock",
        config=config,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        mesh=Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes),
        kernel_init=nd_dense_init(1.0, "fan_in", "truncated_normal"),
        kernel_axes=("embed", "mlp"),
        intermediate_dim=config.mlp_dim,
        dtype=config.dtype,
    )
    key = jax.random.key(0)
    shape = (jax.device_count(), config.max_target_length, config.base_emb_dim)
    x = jax.random.normal(key, shape, config.dtype)
    return layer, layer.init(key, x), x


def outputs(layer, variables, x):
    """The result of the layer, and the gradients of its sum of squares."""

    def loss(variables, x):
        out = layer.apply(variables, x)[0].astype(jnp.float32)
        return (out**2).sum(), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables, x)
    return out, *gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routed_moe(dtype, monkeypatch):
    layer, variables, x = layer_and_inputs(dtype)
    expected = outputs(layer, variables, x)
    monkeypatch.setattr(moe, "jax", substitute.Namespace(jax, lax=substitute.LAX))
    found = outputs(layer, variables, x)
    for actual, desired in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        actual, desired = (np.asarray(y, np.float64) for y in (actual, desired))
        assert actual.shape == desired.shape
        assert np.linalg.norm(actual - desired) <= TOLERANCE * np.linalg.norm(desired)
