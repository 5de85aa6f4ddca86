"""Grouped products and their gradients on a mesh of all GPUs: the bits of float64.

Small integers and power-of-two scales make every sum exact, in any order.
"""

import functools

import gpu_cases
import jax
import numpy as np
import pytest
import ragged_cases
from assertions import assert_all_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import all_gpus, collectives
from test_mesh_gpu import place
from test_partition_grouped import problem, vjp

pytestmark = pytest.mark.gpu

# lhs (m, k), rhs (g, k, n) and out; a collective that moves.
CUTS = {
    "tokens": (P("x"), P(), P("x"), "all-to-all f32"),
    "groups": (P(), P("x"), P(), "all-reduce f32"),
    "k": (P(None, "x"), P(None, "x"), P(), "all-reduce f32"),
    "n": (P(), P(None, None, "x"), P(None, "x"), "all-reduce f32"),
    "tokens, and k of rhs by the same axis": (P("x"), P(None, "x"), P("x"), "all-gather f8e4m3fn"),
}


@functools.cache
def exact(*shape, seed=0):
    """Columns of several powers of two; rows of two, for a group's scale block may hold both.

    The products of a scale block are then multiples of one power of two, and add to less than 2^13
    of it: the tensor core keeps 13 bits below the largest term.
    """
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, size=shape)
    *_, rows, columns = shape
    exponents = rng.integers(0, 2, size=(*shape[:-2], rows // 64, columns // 64))
    exponents = exponents.repeat(64, axis=-2).repeat(64, axis=-1)
    return (x * 2.0 ** (exponents + rng.integers(0, 4, columns // 128).repeat(128))).astype("f4")


@functools.cache
def exact_results():
    return [np.float32(x) for x in ragged_cases.truth(*problem(data=exact), pow2=True)]


@pytest.mark.parametrize("cut", CUTS)
def test_product_and_gradients(cut):
    *specs, moved = CUTS[cut]
    lhs_spec, rhs_spec, out_spec = specs
    on = all_gpus(AxisType.Auto)
    operands = place(on, problem(data=exact), (lhs_spec, rhs_spec, P(), out_spec))
    shardings = tuple(NamedSharding(on, spec) for spec in (out_spec, lhs_spec, rhs_spec))
    run = functools.partial(vjp, implementation=gpu_cases.IMPLEMENTATION)
    compiled = jax.jit(run, out_shardings=shardings).lower(*operands).compile()
    assert any(text.startswith(moved) for text in collectives(compiled))
    results = compiled(*operands)
    for x, sharding in zip(results, shardings, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert_all_same_bits(results, exact_results())
