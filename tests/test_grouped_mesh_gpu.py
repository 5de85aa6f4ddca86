"""Grouped products and their gradients on a mesh of all GPUs: the bits of float64.

Small integers and power-of-two scales, as in test_partition_grouped, make every sum exact.
"""

import functools

import gpu_cases
import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives
from ragged_cases import assert_all_same_bits
from test_mesh_gpu import all_gpus, place
from test_partition_grouped import exact_results, problem, vjp

pytestmark = pytest.mark.gpu

# lhs (m, k), rhs (g, k, n) and out; a collective that moves.
CUTS = {
    "tokens": (P("x"), P(), P("x"), "all-to-all f32"),
    "groups": (P(), P("x"), P(), "all-reduce f32"),
    "k": (P(None, "x"), P(None, "x"), P(), "all-reduce f32"),
    "n": (P(), P(None, None, "x"), P(None, "x"), "all-reduce f32"),
    "tokens, and k of rhs by the same axis": (P("x"), P(None, "x"), P("x"), "all-gather f8e4m3fn"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_product_and_gradients(cut):
    *specs, moved = CUTS[cut]
    lhs_spec, rhs_spec, out_spec = specs
    on = all_gpus(AxisType.Auto)
    operands = place(on, problem(), (lhs_spec, rhs_spec, P(), out_spec))
    shardings = tuple(NamedSharding(on, spec) for spec in (out_spec, lhs_spec, rhs_spec))
    run = functools.partial(vjp, implementation=gpu_cases.IMPLEMENTATION)
    compiled = jax.jit(run, out_shardings=shardings).lower(*operands).compile()
    assert any(text.startswith(moved) for text in collectives(compiled))
    results = compiled(*operands)
    for x, sharding in zip(results, shardings, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert_all_same_bits(results, exact_results())
