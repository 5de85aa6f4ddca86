"""Operands whose rows are stored in whole scale blocks: their bits, and those of products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import padded_cases
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh

import jax_fp8gemm as jf
from jax_fp8gemm._primitives.gemm import gemm
from jax_fp8gemm._primitives.quantize import quantize_in_mode

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.mark.parametrize("mode", padded_cases.MODES)
@pytest.mark.parametrize("fmt, pow2", [(E4M3, False), (E5M2, True)])
def test_zeros_fill_the_rows_and_all_else_is_the_same(mode, fmt, pow2):
    for shape in padded_cases.SHAPES:
        x = padded_cases.with_special_blocks(shape, jnp.bfloat16)
        padded_cases.assert_padded(x, mode, "xla", fmt=fmt, pow2=pow2)


@pytest.mark.parametrize("mode", padded_cases.MODES)
@pytest.mark.parametrize("rows", [128, 72])
def test_elements_of_a_batch_are_those_of_single_calls(mode, rows):
    padded_cases.assert_batches_are_independent(mode, rows, "xla")


@pytest.mark.parametrize("implementation", ["xla", "emulate"])
@pytest.mark.parametrize("m, k, n", [(200, 562, 300), (130, 129, 72), (3, 5, 7)])
def test_products_have_the_bits_of_operands_without_padding(m, k, n, implementation):
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    x, w, dout = draw(0, m, k), draw(1, k, n), draw(2, m, n)
    x = x.at[0, -1].set(jnp.nan)
    out, vjp = jax.vjp(functools.partial(jf.matmul, implementation=implementation), x, w)
    expected = padded_cases.unpadded_products(x, w, dout, implementation)
    for actual, wanted in zip((out, *vjp(dout)), expected, strict=True):
        np.testing.assert_array_equal(actual.view(jnp.uint16), wanted.view(jnp.uint16))
    assert bool(jnp.isnan(out[0]).all()) and bool(jnp.isfinite(out[1:]).all())
    # Weights that were quantised before have no padding.
    weight = jf.quantize_weight(w)
    out, vjp = jax.vjp(functools.partial(jf.matmul, implementation=implementation), x, weight)
    dx, dw = vjp(dout)
    for actual, wanted in zip((out, dx, dw.weight), expected, strict=True):
        np.testing.assert_array_equal(actual.view(jnp.uint16), wanted.view(jnp.uint16))
    out = jf.matmul(x, weight.scaled, implementation=implementation)
    np.testing.assert_array_equal(out.view(jnp.uint16), expected[0].view(jnp.uint16))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "x_spec, w_spec, out_spec",
    [(P(None, "x"), P("x", None), P()), (P("x", None), P(None, "x"), P("x", None))],
    ids=str,
)
def test_a_mesh_cuts_no_padded_dimension(axis_type, x_spec, w_spec, out_spec):
    """With their padding m, k and n are multiples of four blocks. Without it they are not."""
    m, k, n = 500, 496, 508
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    x, w, dout = draw(0, m, k), draw(1, k, n), draw(2, m, n)

    def step(x, w, dout):
        multiply = functools.partial(jf.matmul, implementation="xla", **out_sharding)
        out, vjp = jax.vjp(multiply, x, w)
        return out, *vjp(dout)

    def quantised_once(x, w, dout):
        out, dx, dw = step(x, jf.quantize_weight(w, implementation="xla"), dout)
        return out, dx, dw.weight

    out_sharding = {}
    steps = jax.jit(step), jax.jit(quantised_once)
    expected = steps[0](x, w, dout)
    on = mesh(axis_type)
    if axis_type == AxisType.Explicit:
        out_sharding = dict(out_sharding=NamedSharding(on, out_spec))
    put = lambda x, spec: jax.device_put(x, NamedSharding(on, spec))
    with jax.set_mesh(on):
        found = [run(put(x, x_spec), put(w, w_spec), put(dout, out_spec)) for run in steps]
    for result in found:
        for actual, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted))


def test_a_mesh_cuts_no_k_that_only_one_operand_pads():
    """512 is a multiple of four blocks and 496 is not, so the shards would not fit together."""
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    how = dict(dtype=E4M3, pow2_scale=False, implementation="xla")
    (lhs,) = quantize_in_mode(draw(0, 64, 496), "row", padded=True, **how)
    rhs = jf.quantize(draw(1, 72, 496), block=(128, 128), implementation="xla")
    multiply = jax.jit(lambda lhs, rhs: gemm(lhs, rhs, jnp.float32, "xla"))
    expected = multiply(lhs, rhs)
    on = mesh(AxisType.Auto)
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(on, spec))
    found = multiply(put(lhs, P(None, "x")), put(rhs, P()))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("spec", [P(), P("x", None), P(None, "x")], ids=str)
def test_a_gated_mlp_of_tokens_that_end_within_a_block(spec):
    """On a mesh it has the bits of tokens that zeros fill up to a whole block."""
    m, d, f = 500, 200, 384
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) / 8
    x, w_gate_up, w_down = draw(0, m, d), draw(1, d, 2 * f), draw(2, f, d)
    dout = draw(3, m, d)

    @jax.jit
    def step(x, w_gate_up, w_down, dout):
        mlp = functools.partial(jf.moe.gated_mlp, implementation="xla")
        out, vjp = jax.vjp(mlp, x, w_gate_up, w_down)
        return out, *vjp(dout)

    on = mesh(AxisType.Auto)
    put = lambda x, spec: jax.device_put(x, NamedSharding(on, spec))
    found = step(put(x, spec), put(w_gate_up, P("x", None)), put(w_down, P()), put(dout, spec))
    fill = lambda x: jnp.pad(x, ((0, -m % 128), (0, 0)))
    out, dx, *dw = step(fill(x), w_gate_up, w_down, fill(dout))
    for actual, wanted in zip(found, (out[:m], dx[:m], *dw), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted))
