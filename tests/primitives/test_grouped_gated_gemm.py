"""The gated product: h of grouped_gemm and swiglu_quantize, in one primitive."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import on_cpu, raises
from gated_activations import NAMES, OTHERS, gated
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8gemm import ScaledArray, quantize
from jax_fp8gemm._primitives.grouped_gated_gemm import (
    apart,
    grouped_gated_gemm,
    grouped_gated_gemm_p,
    is_faster,
)
from jax_fp8gemm._primitives.joint import APART

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
M, K, F, SIZES = 60, 200, 128, (17, 0, 30)
PARAMS = dict(
    activation="silu",
    e5m2=False,
    pow2_scale=False,
    reduce_dtype=jnp.dtype(jnp.float32),
    implementation=None,
)
TARGET = "jax_fp8gemm_grouped_gated_gemm"


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def arrays(m=M, k=K, f=F, sizes=SIZES, first_row=5):
    """The quantised rows and weights, and the groups."""
    lhs = quantize(jnp.asarray(normal(m, k)))
    rhs = quantize(jnp.asarray(normal(len(sizes), 2 * f, k, seed=1) / k**0.5), block=(128, 128))
    return lhs, rhs, jnp.asarray(sizes, jnp.int32), jnp.full((1,), first_row, jnp.int32)


def of_h(activation="silu", dtype=E4M3, pow2_scale=False, implementation=None):
    how = dict(dtype=dtype, pow2_scale=pow2_scale, implementation=implementation)
    return dict(activation=activation, **how)


def bound(operands, **how):
    lhs, rhs, *groups = operands
    how = PARAMS | how
    return grouped_gated_gemm_p(lhs.values, lhs.scale, rhs.values, rhs.scale, *groups, **how)


def lowered(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def targets(text):
    return re.findall(r"custom_call @(jax_fp8gemm_\w+)", text)


@pytest.mark.parametrize("activation", ("silu", *OTHERS), ids=("silu", *NAMES))
@pytest.mark.parametrize("dtype, pow2_scale", [(E4M3, False), (E5M2, True)])
def test_against_float64(activation, dtype, pow2_scale):
    lhs, rhs, sizes, first_row = operands = arrays()
    h = grouped_gated_gemm(*operands, **of_h(activation, dtype, pow2_scale))
    x, w = (np.asarray(y.dequantize(), np.float64) for y in (lhs, rhs))
    row = int(first_row[0])
    for i, size in enumerate(SIZES):
        product = x[row : row + size] @ w[i].T
        gate, up = np.split(np.asarray(product.astype(jnp.bfloat16), np.float64), 2, axis=1)
        expected = gated(gate, up, activation)
        found = ScaledArray(h.values[row : row + size], h.scale[row : row + size])
        # gate or up may be rounded to the neighbour in bf16, and h then to that in FP8: a step of
        # 2^-3, or of 2^-2 in e5m2, where FP4 would have one of 2^-1.
        step = 2.0**-3 if dtype == E4M3 else 2.0**-2
        floor = np.abs(expected).max(axis=1, keepdims=True, initial=0) * (2.0**-9 + 2.0**-14)
        error = np.abs(np.asarray(found.dequantize(), np.float64) - expected)
        assert np.all(error <= (step / 2 + 0.02) * np.abs(expected) + floor)
        row += size


@pytest.mark.parametrize("implementation", ["xla", "emulate"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_it_has_the_bits_of_its_parts(implementation, activation):
    lhs, rhs, *groups = operands = arrays()
    how = dict(activation=activation, e5m2=True, pow2_scale=True, implementation=implementation)
    how = PARAMS | how
    found = bound(operands, **how)
    expected = apart(lhs.values, lhs.scale, rhs.values, rhs.scale, *groups, **how)
    for x, y in zip(found, expected, strict=True):
        reference.assert_same_bits(x, y)


def test_it_is_one_kernel_on_one_device():
    text = lowered(partial(grouped_gated_gemm, **of_h("relu2", E5M2, True)), *arrays(k=208))
    assert targets(text) == [TARGET]
    (line,) = (line for line in text.splitlines() if TARGET in line)
    config = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+) : i32", line)}
    wanted = dict(gated=1, activation=3, h_e5m2=1, h_pow2_scale=1, lhs_e5m2=0, grouping=1)
    wanted |= dict(block_m=128, block_n=256, sub_n=128, num_slabs=1, out_f32=0, limit=0)
    assert {name: config[name] for name in wanted} == wanted
    layouts = ", ".join(f"dense<[{x}]> : tensor<2xindex>" for x in ("1, 0", "0, 1"))
    assert f"result_layouts = [{layouts}, dense<0>" in line
    assert "stablehlo.pad" not in text


def test_k_is_padded_to_a_multiple_of_16():
    text = lowered(partial(grouped_gated_gemm, **of_h()), *arrays())
    assert text.count("stablehlo.pad") == 2  # K is 200
    assert f"tensor<{M}x208xf8E4M3FN>" in text


def test_the_emulation_is_no_kernel():
    text = lowered(partial(grouped_gated_gemm, **of_h(implementation="emulate")), *arrays())
    assert targets(text) == []


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh_its_parts_are_divided(axis_type):
    """The columns of gate | up are cut, so that no device has both of a feature."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:2])
    lhs, rhs, *groups = operands = arrays()
    expected = grouped_gated_gemm(*operands, **of_h())
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    rhs = ScaledArray(place(rhs.values, None, "x"), place(rhs.scale, None, "x"), block=rhs.block)
    lhs, groups = (jax.tree.map(place, x) for x in (lhs, groups))
    with jax.set_mesh(mesh):
        run = jax.jit(partial(grouped_gated_gemm, **of_h()))
        found = run(lhs, rhs, *groups)
        text = run.trace(lhs, rhs, *groups).lower(lowering_platforms=("cuda",)).as_text()
    reference.assert_same_bits(found.values, expected.values)
    reference.assert_same_bits(found.scale, expected.scale)
    assert TARGET not in targets(text)
    assert text.count("custom_call @CustomSPMDPartitioning") == 2


def test_a_mesh_gets_the_twin_of_the_weights_and_the_dtype_of_partial_sums():
    lhs, _, *groups = arrays()
    w = jnp.asarray(normal(len(SIZES), K, 2 * F, seed=1))
    rhs = quantize(w, block=(128, 128), with_transpose=True).T
    run = partial(grouped_gated_gemm, **of_h(), reduce_dtype=jnp.bfloat16)
    (eqn,) = (
        eqn
        for eqn in jax.make_jaxpr(run)(lhs, rhs, *groups).jaxpr.eqns
        if eqn.primitive.name == TARGET
    )
    assert eqn.params["twin_of"] == (2, 3) and eqn.params["reduce_dtype"] == jnp.bfloat16
    parts = jax.make_jaxpr(partial(APART[TARGET], **eqn.params))(*(x.aval for x in eqn.invars))
    product, _ = parts.jaxpr.eqns
    assert product.params["twin_of"] == (2, 3) and product.params["reduce_dtype"] == jnp.bfloat16
    assert targets(lowered(run, lhs, rhs, *groups)) == [TARGET]
    expected = run(lhs, ScaledArray(rhs.values, rhs.scale, block=rhs.block), *groups)
    reference.assert_same_bits(jax.jit(run)(lhs, rhs, *groups).values, expected.values)


def test_in_a_shard_map_it_is_one_kernel():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    operands = arrays()
    run = partial(grouped_gated_gemm, **of_h())
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())
    assert targets(lowered(mapped, *operands)) == [TARGET]
    expected = run(*operands)
    reference.assert_same_bits(jax.jit(mapped)(*operands).values, expected.values)


def test_vmap():
    lhs, rhs, sizes, first_row = arrays()
    many = jnp.asarray([SIZES, (0, 41, 3)], jnp.int32)
    run = lambda sizes: grouped_gated_gemm(lhs, rhs, sizes, first_row, **of_h())
    mapped = jax.vmap(run)(many)
    for i in range(2):
        jax.tree.map(lambda x, y, i=i: reference.assert_same_bits(x[i], y), mapped, run(many[i]))


def test_it_has_no_derivative():
    lhs, rhs, *groups = arrays()
    values = lhs.values
    run = lambda scale: bound((ScaledArray(values, scale), rhs, *groups))[1].sum()
    with raises(NotImplementedError, match="grouped_gated_gemm: matmul"):
        jax.grad(run)(lhs.scale)


@pytest.mark.parametrize(
    "f, message",
    [(64, r"rhs must be \(g, 2 f, k\) with f a multiple of 128; got rhs f8e4m3fn\[3,128,200\]")],
)
def test_half_a_scale_block_of_features_raises(f, message):
    with raises(ValueError, match=message):
        grouped_gated_gemm(*arrays(f=f), **of_h())


def test_the_masked_form_raises():
    lhs, rhs, *groups = arrays()
    masked = quantize(jnp.asarray(normal(3, 20, K)))
    with raises(ValueError, match=r"grouped_gated_gemm: lhs must be \(m, k\)"):
        grouped_gated_gemm(masked, rhs, *groups, **of_h())


@on_cpu
def test_the_kernel_is_refused_on_cpu():
    with raises(Exception, match="implementation"):
        grouped_gated_gemm(*arrays(), **of_h(implementation="cuda"))


@pytest.mark.parametrize(
    "m, k, f, num_groups, expected",
    [
        (65536, 7168, 2048, 16, True),  # DeepSeek-V3 on 16 GPUs
        (16384, 4096, 14336, 8, True),  # Mixtral
        (8192, 7168, 2048, 32, True),  # groups of 256 rows
        (4096, 7168, 2048, 32, False),  # short groups
        (65536, 7168, 2000, 16, False),  # no whole scale blocks
        (0, 7168, 2048, 16, False),
        (65536, 0, 2048, 16, False),
        (65536, 7168, 0, 16, False),
    ],
)
def test_which_products_it_is_faster_for(m, k, f, num_groups, expected):
    assert is_faster(m, k, f, num_groups) == expected


def test_a_symbolic_number_of_rows_is_left_to_the_parts():
    (m,) = jax.export.symbolic_shape("m")
    assert not is_faster(m, 7168, 2048, 16)
    assert not is_faster(65536, m, 2048, 16)
    assert not is_faster(65536, 7168, m, 16)
