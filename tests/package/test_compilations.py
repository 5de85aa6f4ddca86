"""An eager call compiles what it runs once: a second call of the same shapes compiles nothing."""

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring

import jax_fp8gemm as fp8
from jax_fp8gemm import moe

_compilations = []
monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _compilations.append(event) if "backend_compile" in event else None
)

ones, sizes = jnp.ones, jnp.asarray([2, 2])
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
product = lambda x: fp8.matmul(x, ones((2, 8, 8))).sum()
CALLS = {
    "matmul": lambda: fp8.matmul(ones((4, 3)), ones((3, 4))),
    "matmul, rhs batched": lambda: fp8.matmul(ones((4, 3)), ones((2, 3, 4))),
    "matmul, lhs of one element": lambda: fp8.matmul(ones((1, 4, 3)), ones((2, 3, 4))),
    "matmul, vector": lambda: fp8.matmul(ones(3), ones((2, 3, 4))),
    "matmul, both": lambda: fp8.matmul(ones((2, 1, 4, 3)), ones((3, 3, 4))),
    "vmap": lambda: jax.vmap(fp8.matmul, (None, 0))(ones((4, 8)), ones((2, 8, 8))),
    "grad": lambda: jax.grad(product)(ones((4, 8))),
    "dot_general": lambda: fp8.dot_general(
        ones((2, 4, 8)), ones((2, 3, 8)), (((2,), (2,)), ((0,), (0,)))
    ),
    "einsum": lambda: fp8.einsum("mk,kn->nm", ones((4, 3)), ones((3, 4))),
    "ragged_dot": lambda: fp8.ragged_dot(ones((4, 8)), ones((2, 8, 8)), sizes),
    "ragged_dot, vmap": lambda: jax.vmap(fp8.ragged_dot, (0, None, None))(
        ones((2, 4, 8)), ones((2, 8, 8)), sizes
    ),
    "ragged_dot_general": lambda: fp8.ragged_dot_general(
        ones((4, 8)), ones((4, 8)), sizes, OVER_ROWS
    ),
    "quantize_weight": lambda: fp8.quantize_weight(ones((4, 8, 8))),
    "quantize_weight, folded": lambda: fp8.quantize_weight(ones((4, 8, 8)), contracting=(1, 0)),
    "matmul, QuantizedWeight": lambda: fp8.matmul(ones((4, 8)), fp8.quantize_weight(ones((8, 8)))),
    "quantize_both": lambda: fp8.quantize_both(ones((2, 4, 8))),
    "moe_mlp": lambda: moe.moe_mlp(ones((4, 8)), ones((2, 8, 16)), ones((2, 8, 8)), sizes),
    "moe_layer": lambda: moe.moe_layer(
        ones((4, 8)), ones((4, 2)), ones((2, 8, 16)), ones((2, 8, 8)), top_k=1
    ),
    "route": lambda: moe.route(ones((4, 4)), 2, bias=ones((4,)), n_group=2, topk_group=1),
    "load_balancing_loss": lambda: moe.load_balancing_loss(ones((4, 2)), sizes),
    "z_loss": lambda: moe.z_loss(ones((4, 2))),
    "update_balance_bias": lambda: moe.update_balance_bias(ones((2,)), sizes, 0.1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_second_call_compiles_nothing(call):
    call()
    first = len(_compilations)
    call()
    assert len(_compilations) == first


def test_compilations_are_counted():
    before = len(_compilations)
    jax.jit(lambda x: x + 1)(1)
    assert len(_compilations) == before + 1
