"""Both forms of quantize_blocks, C++ for a CPU and plain JAX, against NumPy and ml_dtypes."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from xla_options import AS_USERS_DO

import jax_fp8gemm as fp8
from jax_fp8gemm._primitives import quantize_blocks as module
from jax_fp8gemm._primitives.quantize_blocks import quantize_blocks
from jax_fp8gemm._runtime import extension

# Plain JAX is tested without the extension too. test_ffi.py fails where one is built and has no
# target for a CPU, so this skip cannot hide that.
calls_cpp = pytest.mark.skipif(
    not extension.has_cpu_targets, reason="calls a function of the extension, which is not built"
)

FORMATS = list(itertools.product([False, True], [False, True]))  # e5m2, pow2_scale
BLOCKS = list(itertools.product([1, 128], [False, True]))  # block_m, is_transposed
IN_CPP = jax.jit(quantize_blocks, static_argnums=(1, 2, 3, 4), compiler_options=AS_USERS_DO)


@partial(jax.jit, static_argnums=(1, 2, 3, 4), compiler_options=AS_USERS_DO)
def in_plain_jax(x, block_m, e5m2, pow2_scale, is_transposed):
    how = dict(is_square=block_m == 128, is_transposed=is_transposed)
    return module._in_plain_jax(x, **how, e5m2=e5m2, pow2_scale=pow2_scale)


FORMS = {"C++": IN_CPP, "plain JAX": in_plain_jax}
each_form = pytest.mark.parametrize("form", [pytest.param("C++", marks=calls_cpp), "plain JAX"])


@pytest.fixture(autouse=True)
def _on_a_cpu():
    """Also where JAX has a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def assert_bits(form, x, block_m, e5m2, pow2_scale, is_transposed):
    values, scale = FORMS[form](x, block_m, e5m2, pow2_scale, is_transposed)
    fmt = ml_dtypes.float8_e5m2 if e5m2 else ml_dtypes.float8_e4m3fn
    how = dict(axis=-2 if is_transposed else -1, fmt=fmt, pow2=pow2_scale)
    expected = reference.quantize(x, (block_m, 128), **how)
    reference.assert_same_bits(values, expected[0], "values")
    reference.assert_same_bits(scale, expected[1], "scale")


@each_form
@pytest.mark.parametrize("e5m2, pow2_scale", FORMATS)
@pytest.mark.parametrize("block_m, is_transposed", BLOCKS)
# One block; whole ones; ragged ones along both dimensions; a batch; nothing.
@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (130, 270), (2, 3, 129, 5), (0, 4), (3, 0)])
def test_bits_of_shapes(form, shape, block_m, is_transposed, e5m2, pow2_scale):
    rng = np.random.default_rng(0)
    wide = rng.normal(size=shape) * np.exp(rng.uniform(-24, 4, size=shape))
    assert_bits(form, wide.astype(np.float32), block_m, e5m2, pow2_scale, is_transposed)


@each_form
@pytest.mark.parametrize("e5m2, pow2_scale", FORMATS)
@given(bits=hnp.arrays(np.uint32, (3, 140), elements=st.integers(0, 2**32 - 1)))
@settings(max_examples=30, deadline=None)
def test_bits_of_arbitrary_floats(form, e5m2, pow2_scale, bits):
    assert_bits(form, bits.view(np.float32), 1, e5m2, pow2_scale, False)


@each_form
@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("block_m", [1, 128])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_bits_of_every_number_of_16_bits(form, dtype, block_m, e5m2):
    # In their order, so that a block has numbers of a few magnitudes, and few have Inf or NaN.
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(512, 128)
    assert_bits(form, x, block_m, e5m2, False, False)


@calls_cpp
@pytest.mark.parametrize("e5m2", [False, True])
def test_every_rounding(e5m2):
    """All values of the format, their midpoints, and the neighbours of both in f32."""
    fmt = ml_dtypes.float8_e5m2 if e5m2 else ml_dtypes.float8_e4m3fn
    values = np.arange(256, dtype=np.uint8).view(fmt).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    exact = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    x = np.concatenate([exact, np.nextafter(exact, np.inf), np.nextafter(exact, -np.inf)])
    fmax = np.float32(values.max())
    x = np.clip(x, -fmax, fmax)
    rows = np.full((-(-x.size // 127), 128), fmax, np.float32)  # the scale of each row is 1
    rows[:, 1:].flat[: x.size] = x
    assert_bits("C++", rows, 1, e5m2, False, False)


@calls_cpp
def test_vmap_folds_into_the_batch():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 2, 130)), jnp.float32)
    run = partial(quantize_blocks, block_m=128, e5m2=False, pow2_scale=False)
    for found, expected in zip(jax.vmap(run, 1)(x), run(x.swapaxes(0, 1)), strict=True):
        reference.assert_same_bits(found, expected, "vmap")


CALL = f"custom_call @{extension.QUANTIZE_BLOCKS_TARGET}"


@calls_cpp
def test_a_program_for_a_cpu_has_one_call():
    traced = jax.jit(partial(fp8.quantize, implementation="xla")).trace(jnp.ones((4, 256)))
    lower = lambda platform: traced.lower(lowering_platforms=(platform,)).as_text()
    assert lower("cpu").count(CALL) == 1
    assert lower("cuda").count(CALL) == 0


def test_an_exported_program_needs_no_extension():
    function = jax.jit(partial(fp8.quantize, implementation="xla"))
    exported = jax.export.export(function, platforms=("cpu",))(jnp.ones((4, 256)))
    assert CALL not in exported.mlir_module()


@calls_cpp
def test_a_cpu_without_the_extension_takes_plain_jax(monkeypatch):
    monkeypatch.setattr(extension, "has_cpu_targets", False)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 200)), jnp.float32)
    found = jax.jit(lambda x: quantize_blocks(x, 1, False, False))
    assert "custom_call" not in found.lower(x).as_text()
    for one, other in zip(found(x), IN_CPP(x, 1, False, False, False), strict=True):
        reference.assert_same_bits(one, other, "without the extension")


F8, F32 = jnp.float8_e4m3fn, jnp.float32


@calls_cpp
@pytest.mark.parametrize(
    "x, values, scale, message",
    [
        ((4,), ((4,), F8), ((1,), F32), r"x must be \(\.\.\., m, k\); got f32\[4\]"),
        ((4, 9), ((4, 8), F8), ((4, 1), F32), r"values must be f8e4m3fn\[\.\.\.,4,9\].*\[4,8\]"),
        ((4, 9), ((4, 9), jnp.int8), ((4, 1), F32), r"values must be f8e4m3fn.*; got other\[4,9\]"),
        ((4, 9), ((4, 9), F8), ((4, 2), F32), r"scale must be f32\[\.\.\.,4,1\].*got f32\[4,2\]"),
        ((2, 4, 9), ((4, 9), F8), ((4, 1), F32), r"first dimensions of x f32\[2,4,9\]"),
        ((2, 4, 9), ((3, 4, 9), F8), ((2, 4, 1), F32), r"got f8e4m3fn\[3,4,9\]"),
    ],
)
def test_the_handler_refuses_what_does_not_fit(x, values, scale, message):
    types = [jax.ShapeDtypeStruct(*values), jax.ShapeDtypeStruct(*scale)]
    call = jax.ffi.ffi_call(extension.QUANTIZE_BLOCKS_TARGET, types)
    how = dict(e5m2=False, is_square=False, is_transposed=False, pow2_scale=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(jnp.ones(x), **how)


@calls_cpp
def test_the_handler_refuses_other_types():
    types = [jax.ShapeDtypeStruct((4, 9), F8), jax.ShapeDtypeStruct((4, 1), F32)]
    call = jax.ffi.ffi_call(extension.QUANTIZE_BLOCKS_TARGET, types)
    how = dict(e5m2=False, is_square=False, is_transposed=False, pow2_scale=False)
    message = r"x must be bf16, f16 or f32; got i32\[4,9\]"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(jnp.ones((4, 9), jnp.int32), **how)
