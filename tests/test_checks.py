import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

from jax_fp8gemm import _checks

F8 = jnp.float8_e4m3fn


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "dtype, short",
    [
        (jnp.float8_e4m3fn, "f8e4m3fn"),
        (jnp.float8_e5m2, "f8e5m2"),
        (jnp.bfloat16, "bf16"),
        (jnp.float16, "f16"),
        (jnp.float32, "f32"),
        (jnp.int32, "s32"),
        (jnp.uint8, "u8"),
        (jnp.bool_, "bool"),
    ],
)
def test_short_type_names_dtypes_as_xla_does(dtype, short):
    assert _checks.short_type(struct((4096, 7168), dtype)) == f"{short}[4096,7168]"


def test_short_type_of_a_scalar_and_of_no_array():
    assert _checks.short_type(np.float32(1)) == "f32[]"
    assert _checks.short_type([1]) == "list"


@pytest.mark.parametrize(
    "shape, block, expected",
    [
        ((4, 128), (1, 128), (4, 1)),
        ((4, 129), (1, 128), (4, 2)),
        ((129, 127), (128, 128), (2, 1)),
        ((3, 0, 5), (128, 128), (3, 0, 1)),
    ],
)
def test_scale_shape(shape, block, expected):
    assert _checks.scale_shape(shape, block) == expected


def test_scale_of_the_wrong_shape_is_told_with_its_origin():
    message = (
        r"gemm: lhs_scale must be f32\[4096,56\] \(one scale per 1x128 block of "
        r"lhs f8e4m3fn\[4096,7168\]\); got f32\[4096,55\]"
    )
    with raises(ValueError, match=message):
        _checks.check_scaled("gemm", "lhs", struct((4096, 7168), F8), struct((4096, 55)), (1, 128))


def test_scale_of_the_wrong_dtype():
    values, scale = struct((128, 128), F8), struct((1, 1), jnp.bfloat16)
    with raises(ValueError, match=r"rhs_scale must be f32\[1,1\].*; got bf16\[1,1\]"):
        _checks.check_scaled("gemm", "rhs", values, scale, (128, 128))


def test_values_that_are_not_fp8():
    with raises(TypeError, match=r"lhs must be f8e4m3fn or f8e5m2; got lhs bf16\[8,128\]"):
        values = struct((8, 128), jnp.bfloat16)
        _checks.check_scaled("gemm", "lhs", values, struct((8, 1)), (1, 128))
