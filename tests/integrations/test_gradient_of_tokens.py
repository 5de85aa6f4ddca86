"""The gradient of a token beside tokens that matter more to the loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gradient_accuracy import E4M3, D, blockwise, rounded, squarewise

from jax_fp8gemm import DEEPSEEK_V3, matmul


@pytest.mark.parametrize("kind", ["deepseek_v3", "squares"])
def test_a_token_keeps_its_gradient_beside_tokens_that_matter_more(kind):
    """Every other token has cotangents 10^-6 of the others'. Squares on dout make them zero."""
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    size = 10.0 ** (-6 * (np.arange(256) % 2))
    x, w, dout = normal(256, D), normal(D, D), normal(256, D) * size[:, None].astype(np.float32)
    if kind == "deepseek_v3":
        multiply = lambda x: matmul(x, w, recipe=DEEPSEEK_V3)
    else:
        product = rounded(partial(blockwise, E4M3), partial(squarewise, E4M3))
        multiply = lambda x: product(x, w[None], jnp.ones((256, 1)))
    (dx,) = jax.vjp(multiply, x)[1](dout)
    truth = np.asarray(dout, np.float64) @ np.asarray(w, np.float64).T
    errors = np.linalg.norm(dx - truth, axis=1) / np.linalg.norm(truth, axis=1)
    # Two operands with three bits of mantissa: an error of 2.6 % each.
    of_light = (0.02, 0.06) if kind == "deepseek_v3" else (0.99, 1.01)
    assert all(0.02 < e < 0.06 for e in errors[::2]), errors
    assert all(of_light[0] < e < of_light[1] for e in errors[1::2]), errors
