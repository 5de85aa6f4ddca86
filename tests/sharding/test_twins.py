"""Which of an operand and its twin, the same array transposed, each device reads."""

import jax.numpy as jnp
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh

from jax_fp8gemm._sharding.twins import place_twins

# How an operand is cut, and its twin; how the op needs the operand; what is moved, if the twin is.
CUTS = {
    "replicated": ([(), ()], [(), ()], P(None, None), None),
    "in place": ([("x",), ()], [(), ("x",)], P("x", None), None),
    "cut on": ([(), ()], [(), ()], P("x", None), None),
    "gathered": ([("x",), ()], [(), ("x",)], P(None, None), P(None, None)),
    "gathered over one axis": ([("x",), ("y",)], [("y",), ("x",)], P("x", None), P(None, "x")),
    "cut elsewhere": ([("x",), ()], [(), ("x",)], P(None, "x"), P("x", None)),
}


@pytest.mark.parametrize("given, of_twin, needed, moved", CUTS.values(), ids=CUTS)
def test_a_twin_is_read_where_the_operand_would_be_moved(given, of_twin, needed, moved):
    on = mesh(AxisType.Auto, AxisType.Auto, shape=(4, 2))
    placed = place_twins(on, [0], [given, of_twin], [NamedSharding(on, needed)])
    spec = lambda dims: P(*(axes or None for axes in dims))
    operand, twin = jnp.zeros((2, 3)), jnp.ones((3, 2))
    (chosen,) = placed.chosen([operand, twin])
    if moved is None:
        assert placed.operands[0].spec == needed and placed.twins[0].spec == spec(of_twin)
        assert chosen is operand
    else:
        assert placed.operands[0].spec == spec(given) and placed.twins[0].spec == moved
        reference.assert_same_bits(chosen, jnp.ones((2, 3)))
