import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, without_annotation_checks

import jax_fp8gemm as fp8
from jax_fp8gemm import moe
from jax_fp8gemm._data import checks, formats

F8 = jnp.float8_e4m3fn


class Held:
    """As flax.nnx.Param: not an array, but its value."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


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
    assert checks.short_type(struct((4096, 7168), dtype)) == f"{short}[4096,7168]"


def test_short_type_of_a_scalar_and_of_no_array():
    assert checks.short_type(np.float32(1)) == "f32[]"
    assert checks.short_type([1]) == "list"


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
    assert formats.scale_shape(shape, block) == expected


def test_scale_of_the_wrong_shape_is_told_with_its_origin():
    message = (
        r"gemm: lhs_scale must be f32\[4096,56\] \(one scale per 1x128 block of "
        r"lhs f8e4m3fn\[4096,7168\]\); got f32\[4096,55\]"
    )
    with raises(ValueError, match=message):
        checks.check_scaled("gemm", "lhs", struct((4096, 7168), F8), struct((4096, 55)), (1, 128))


def test_scale_of_the_wrong_dtype():
    values, scale = struct((128, 128), F8), struct((1, 1), jnp.bfloat16)
    with raises(ValueError, match=r"rhs_scale must be f32\[1,1\].*; got bf16\[1,1\]"):
        checks.check_scaled("gemm", "rhs", values, scale, (128, 128))


def test_a_hint_is_a_sentence_behind_the_message():
    check = lambda **hint: checks.check_ndim("op", "x", struct((3,)), 2, "(m, k)", **hint)
    with raises(ValueError, match=r"x must be \(m, k\); got x f32\[3\]$"):
        check()
    with raises(ValueError, match=r"; got x f32\[3\]\. Pad it\.$"):
        check(hint="Pad it.")


def test_an_implementation_of_another_type():
    for given in (jnp.ones(2), ["cuda"], 1):
        with raises(
            ValueError, match="quantize: implementation must be None, 'cuda', 'xla' or 'emulate'; "
        ):
            checks.check_implementation("quantize", given)


def test_values_that_are_not_fp8():
    with raises(TypeError, match=r"lhs must be f8e4m3fn or f8e5m2; got lhs bf16\[8,128\]"):
        values = struct((8, 128), jnp.bfloat16)
        checks.check_scaled("gemm", "lhs", values, struct((8, 1)), (1, 128))


ROWS, MATRIX, MATRICES = jnp.ones((8, 128)), jnp.ones((128, 256)), jnp.ones((1, 128, 256))
DOWN, SIZES = jnp.ones((1, 128, 128)), jnp.asarray([8])
QUANTISED, TRANSPOSED = fp8.quantize(ROWS), fp8.quantize(MATRIX.T, block=(128, 128))
COLUMNS = fp8.quantize_ragged(ROWS, SIZES)
CHOICES, WEIGHTS = jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1))
RAGGED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
OPS = {
    "matmul": (fp8.matmul, (ROWS, MATRIX)),
    "matmul of a ScaledArray": (fp8.matmul, (ROWS, TRANSPOSED.T)),
    "dot_general": (lambda *x: fp8.dot_general(*x, (((1,), (0,)), ((), ()))), (ROWS, MATRIX)),
    "ragged_dot": (fp8.ragged_dot, (ROWS, MATRICES, SIZES)),
    "ragged_dot_general": (lambda *x: fp8.ragged_dot_general(*x, RAGGED), (ROWS, ROWS, SIZES)),
    "quantize": (fp8.quantize, (ROWS,)),
    "quantize_both": (fp8.quantize_both, (ROWS,)),
    "quantize_ragged": (fp8.quantize_ragged, (ROWS, SIZES)),
    "dequantize": (fp8.dequantize, (QUANTISED,)),
    "scaled_matmul": (
        lambda lhs, rhs, accum: fp8.scaled_matmul(
            lhs, rhs, out_dtype=jnp.float32, accumulate_into=accum
        ),
        (QUANTISED, TRANSPOSED, jnp.ones((8, 256))),
    ),
    "scaled_ragged_dot": (
        fp8.scaled_ragged_dot,
        (QUANTISED, fp8.quantize(MATRICES.mT, block=(128, 128)), SIZES),
    ),
    "scaled_ragged_wgrad": (fp8.scaled_ragged_wgrad, (COLUMNS, COLUMNS, SIZES)),
    "moe_mlp": (moe.moe_mlp, (ROWS, MATRICES, DOWN, SIZES)),
    "moe_layer": (
        lambda x, *args: moe.moe_layer(x, args[:2], *args[2:]),
        (ROWS, CHOICES, WEIGHTS, MATRICES, DOWN),
    ),
    "moe_layer of logits": (
        lambda *args: moe.moe_layer(*args, top_k=1),
        (ROWS, WEIGHTS, MATRICES, DOWN),
    ),
    "route": (lambda logits: moe.route(logits, 2), (ROWS,)),
    "permute": (lambda *x: moe.permute(*x, 1), (ROWS, CHOICES)),
    "unpermute": (moe.unpermute, (ROWS, CHOICES + jnp.arange(8)[:, None], WEIGHTS)),
}


@pytest.mark.parametrize("op, args", OPS.values(), ids=OPS.keys())
def test_ops_take_what_jax_takes_for_an_array(op, args):
    with without_annotation_checks():
        found = jax.eval_shape(lambda *args: op(*map(Held, args)), *args)
    assert str(found) == str(jax.eval_shape(op, *args))


@pytest.mark.parametrize("op, args", OPS.values(), ids=OPS.keys())
def test_ops_name_an_operand_without_a_value(op, args):
    structs = [jax.tree.map(lambda x: struct(x.shape, x.dtype), x) for x in args]
    with raises(TypeError, match="must be an array; got ShapeDtypeStruct"):
        op(*structs)


def test_numpy_scalars_are_arrays():
    with raises(ValueError, match=r"matmul: lhs must be \(..., m, k\) or \(k,\); got lhs f32\[\]"):
        fp8.matmul(np.float32(1), MATRIX)


def test_an_accumulator_that_is_no_array():
    with raises(TypeError, match="scaled_matmul: accumulate_into must be an array; got float"):
        fp8.scaled_matmul(QUANTISED, TRANSPOSED, out_dtype=jnp.float32, accumulate_into=1.0)


@pytest.mark.parametrize("op, args", OPS.values(), ids=OPS.keys())
def test_offloaded_operands_must_come_back_first(op, args):
    on_host = jax.device_put(args, jax.memory.Space.Host)
    for run in (op, jax.jit(op)):
        with raises(ValueError, match=r"must be in device memory; got .* in host memory\. Bring"):
            run(*on_host)
    back = op(*jax.device_put(on_host, jax.memory.Space.Device))
    jax.tree.map(np.testing.assert_array_equal, back, op(*args))
