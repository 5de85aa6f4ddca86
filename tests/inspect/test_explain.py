"""explain: the ops of a program, their sums, and where they run."""

import json

import jax
import jax.numpy as jnp
import pytest

import jax_fp8gemm
from jax_fp8gemm import explain, matmul
from jax_fp8gemm._tuning.choose import choose

_X = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
_W = jax.ShapeDtypeStruct((512, 384), jnp.bfloat16)
_FLOP = 2 * 256 * 512 * 384


def _loss(x, w):
    with jax.named_scope("block"):
        return matmul(x, w).astype(jnp.float32).sum()


def test_a_matmul_and_its_gradients_have_three_products():
    found = explain(jax.jit(jax.grad(_loss, argnums=(0, 1))), _X, _W)
    products = [r for r in found.records if r["call"] == "gemm"]
    # The forward product is not needed: the gradient of a sum does not read it.
    assert found.flop == len(products) * _FLOP == 2 * _FLOP
    assert explain(jax.value_and_grad(_loss, argnums=(0, 1)), _X, _W).flop == 3 * _FLOP
    assert {r["path"] for r in found.records} == {"block"}
    assert found.time_us == sum(r["time_us"] for r in found.records) > 3


def test_the_record_of_a_product():
    *quantisations, product = explain(_loss, _X, _W).records
    assert [r["call"] for r in quantisations] == ["quantize", "quantize"]
    assert product["bytes"] == 256 * 512 + 384 * 512 + 2 * 256 * 384 + 4 * (256 * 4 + 3 * 4)
    config = choose(256, 384, 512, is_1d1d=False, out_f32=False, accumulate=False)
    assert product["config"].startswith(f"{config.block_m}x{config.block_n}, ")
    assert quantisations[0]["bytes"] == 3 * 256 * 512 + 4 * 256 * 4


def test_explicit_axes_change_no_record():
    loss_and_gradients = jax.value_and_grad(_loss, argnums=(0, 1))
    alone = explain(loss_and_gradients, _X, _W)
    with jax.set_mesh(jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))):
        assert explain(loss_and_gradients, _X, _W).records == alone.records


def test_loops_count_their_runs():
    def loop(x, w):
        body = lambda total, _: (total + _loss(x, w), None)
        outer = lambda total, _: jax.lax.scan(body, total, length=5)
        return jax.lax.scan(outer, jnp.float32(0), length=3)[0]

    found = explain(loop, _X, _W)
    assert {r["runs"] for r in found.records} == {15}
    assert found.flop == 15 * _FLOP

    def until(x, w):
        return jax.lax.while_loop(lambda t: t < 9, lambda t: t + _loss(x, w), jnp.float32(0))

    found = explain(until, _X, _W)
    assert {r["runs"] for r in found.records} == {None}
    assert found.flop is found.time_us is None


def test_a_grouped_product_and_its_gradients():
    weights = jax.ShapeDtypeStruct((4, 512, 384), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def loss(x, w, sizes):
        return jax_fp8gemm.ragged_dot(x, w, sizes).astype(jnp.float32).sum()

    found = explain(jax.value_and_grad(loss, argnums=(0, 1)), _X, weights, sizes)
    flop = {r["call"]: r["flop"] for r in found.records if r["flop"]}
    # Up to 127 zeros complete the tokens of each group.
    assert flop == {"grouped_gemm": _FLOP, "grouped_wgrad": 2 * 512 * 384 * (256 + 3 * 128)}
    assert found.flop == 2 * _FLOP + flop["grouped_wgrad"]


@pytest.mark.skipif(
    jax.default_backend() == "gpu",
    reason="on a GPU the kernels run, so explain gives no reason against them",
)
def test_it_says_why_the_reference_runs():
    default = explain(_loss, _X, _W).records[0]["implementation"]
    assert default.startswith("reference: ")
    chosen = explain(lambda x, w: matmul(x, w, implementation="xla"), _X, _W)
    assert {r["implementation"] for r in chosen.records} == {"reference: implementation='xla'"}


def test_what_it_prints():
    found = explain(_loss, _X, _W)
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["path", "op", "call"]
    assert len(lines) == 5
    assert lines[-1].startswith("total: ")
    assert "<th>block</th>" in found._repr_html_()
    assert json.loads(json.dumps(found.records)) == found.records
