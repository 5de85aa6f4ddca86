"""Wrong arguments that used to end in an error of NumPy, Python or JAX: what an op says of them."""

import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, without_annotation_checks

import jax_fp8gemm as fp8
from jax_fp8gemm import moe

X, MATRICES, SIZES = jnp.ones((4, 128)), jnp.ones((2, 128, 128)), jnp.asarray([2, 2])
EXPERTS = jnp.ones((2, 128, 256)), MATRICES
LOGITS, CHOICES = jnp.ones((4, 2)), jnp.zeros((4, 1), jnp.int32)
layer = functools.partial(moe.moe_layer, X, top_k=1)

# Whatever a caller may take for a dtype, and what is said of it.
NO_DTYPES = {
    "key": (jax.random.key(0), r"key<\w+>\[\]"),
    "dtype of a key": (jax.random.key(0).dtype, r"key<\w+>"),
    "module with a dtype": (np, "module"),
    "module without": (functools, "module"),
    "array": (jnp.ones(3), r"f32\[3\]"),
    "no text of NumPy's": (",", "','"),
    "recipe": (fp8.BF16, r"Recipe\(fwd=None\)"),
}


@pytest.mark.parametrize("given, said", NO_DTYPES.values(), ids=NO_DTYPES.keys())
def test_no_dtype(given, said):
    with raises(TypeError, match=rf"^quantize: dtype must be f8e4m3fn or f8e5m2; got {said}$"):
        fp8.quantize(X, dtype=given)
    with raises(TypeError, match=rf"^matmul: preferred_element_type must be .*; got {said}$"):
        fp8.matmul(X, X.T, preferred_element_type=given)
    with raises(TypeError, match=rf"^dequantize: dtype must be bf16, f16 or f32; got {said}$"):
        fp8.dequantize(fp8.quantize(X), dtype=given)


@pytest.mark.parametrize("leaf", [np, jax.random.key(0), None, 1.0], ids=str)
def test_no_leaves_of_a_scaled_array(leaf):
    x = fp8.ScaledArray(leaf, leaf, None, (128, 128))
    with raises(TypeError, match="^ScaledArray.T: values must be an array of numbers; got "):
        _ = x.T
    with raises(TypeError, match="^scaled_matmul: lhs"):
        fp8.scaled_matmul(x, x)
    with raises(TypeError, match="^matmul: lhs must be an array; got a ScaledArray"):
        fp8.matmul(x, X.T)
    with raises(TypeError, match="^dequantize: x must be a ScaledArray; got "):
        fp8.dequantize(leaf)


def test_text_of_many_lines_is_told_by_its_type():
    with raises(ValueError, match=r"block must be \(1, 128\) or \(128, 128\); got key<\w+>\[\]$"):
        fp8.quantize(X, block=jax.random.key(0))
    with raises(
        ValueError, match="implementation must be None, 'cuda', 'xla' or 'emulate'; got module$"
    ):
        fp8.quantize(X, implementation=functools)


def test_no_choice_of_unused_rows():
    lhs, rhs = fp8.quantize(jnp.ones((2, 4, 128))), fp8.quantize(MATRICES, block=(128, 128))
    for given, said in ((0, "0"), ("nothing", "'nothing'"), (functools, "module")):
        message = rf"^scaled_ragged_dot: unused_rows must be 'zero' or 'undefined'; got {said}$"
        with raises(ValueError, match=message):
            fp8.scaled_ragged_dot(lhs, rhs.T, SIZES, unused_rows=given)


def test_byte_swapped_arrays():
    swapped = np.ones((4, 2), ">f4")
    with raises(TypeError, match=r"^moe_layer: router must .*; got router byte-swapped f32\[4,2\]"):
        layer(swapped, *EXPERTS)
    with raises(TypeError, match=r"^moe_layer: weights must .*; got weights byte-swapped f32"):
        layer((CHOICES, swapped[:, :1]), *EXPERTS)


@pytest.mark.parametrize("factor", [10**400, 10**308, fractions.Fraction(10**400, 3)], ids=range(3))
def test_a_capacity_beyond_any_float_keeps_all(factor):
    with without_annotation_checks():  # which name floats
        found = layer(LOGITS, *EXPERTS, capacity_factor=factor)
    np.testing.assert_array_equal(found, layer(LOGITS, *EXPERTS))


@pytest.mark.parametrize("factor", [-(10**400), -(10**5000)], ids=["400 digits", "5000"])
def test_a_capacity_below_any_float(factor):
    with raises(ValueError, match="^moe_layer: capacity_factor must be None or above 0; got int$"):
        layer(LOGITS, *EXPERTS, capacity_factor=factor)


@pytest.mark.parametrize("options", [dict(precision="highest"), dict(recipe=fp8.BF16), {}], ids=str)
def test_batches_that_do_not_broadcast(options):
    lhs, rhs = jnp.ones((2, 4, 8)), jnp.ones((3, 8, 4))
    message = r"^matmul: batch dimensions of lhs and rhs must broadcast; got lhs f32\[2,4,8\], rhs "
    with raises(ValueError, match=message):
        fp8.matmul(lhs, rhs, **options)


def on_second_device(x):
    return jax.device_put(x, jax.devices()[1])


FAR = {
    "matmul": lambda lhs: fp8.matmul(lhs, on_second_device(X.T)),
    "dot_general": lambda lhs: fp8.dot_general(lhs, on_second_device(X), (((1,), (1,)), ((), ()))),
    "ragged_dot": lambda lhs: fp8.ragged_dot(lhs, MATRICES, on_second_device(SIZES)),
    "scaled_matmul": lambda lhs: fp8.scaled_matmul(
        fp8.quantize(lhs), fp8.quantize(on_second_device(X))
    ),
    "permute": lambda lhs: moe.permute(lhs, on_second_device(CHOICES), 2),
    "moe_mlp": lambda lhs: moe.moe_mlp(lhs, *map(on_second_device, EXPERTS), SIZES),
    "moe_layer": lambda lhs: moe.moe_layer(lhs, LOGITS, *map(on_second_device, EXPERTS), top_k=1),
}


@pytest.mark.parametrize("op", FAR)
def test_operands_on_different_devices(op):
    near = jax.device_put(X, jax.devices()[0])
    message = (
        rf"^{op}: operands must be on the same devices; got [\w.]+ f\w+\[4,128\] on cpu:0, .* on "
        r"cpu:1.*\. Move them with jax\.device_put\.$"
    )
    with raises(ValueError, match=message):
        FAR[op](near)


def test_the_parts_of_an_operand_are_named():
    near, far = jax.device_put(X, jax.devices()[0]), on_second_device(X)
    rhs = r"rhs\.values f8e4m3fn\[4,128\] on cpu:1, rhs\.scale f32\[4,1\] on cpu:1\. Move"
    with raises(ValueError, match=rf"^scaled_matmul: .*; got lhs\.values .* on cpu:0, {rhs}"):
        fp8.scaled_matmul(fp8.quantize(near), fp8.quantize(far))
    operands = r"operands\[0\] f32\[4,128\] on cpu:0, operands\[1\] f32\[4,128\] on cpu:1"
    with raises(ValueError, match=rf"^einsum: .*; got {operands}\. Move"):
        fp8.einsum("mk,nk->mn", near, far)


@pytest.mark.parametrize("call", [fp8.matmul, jax.grad(lambda *xs: fp8.matmul(*xs).sum())])
def test_operands_off_the_mesh_of_the_context(call):
    """They agree with each other, and not with jax.set_mesh."""
    lhs, rhs = (jax.device_put(x, jax.devices()[0]) for x in (X, X.T))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    of_mesh = r"the mesh of jax\.set_mesh on cpu:0 and 1 more\. Move them onto the mesh with jax"
    with jax.set_mesh(mesh):
        with raises(ValueError, match=rf"^matmul: .*, rhs f32\[128,4\] on cpu:0, {of_mesh}"):
            call(lhs, rhs)
        lhs, rhs = (jax.device_put(x, jax.NamedSharding(mesh, jax.P())) for x in (lhs, rhs))
        call(lhs, rhs)
        with raises(ValueError, match=rf"^matmul: .*, rhs f32\[128,4\] on cpu:2, {of_mesh}"):
            call(lhs, jax.device_put(rhs, jax.devices()[2]))


def test_devices_of_tracers_are_left_out():
    far, near = on_second_device(X.T), jax.device_put(X, jax.devices()[0])
    message = r"^matmul: operands .*; got lhs f32\[4,128\], rhs f32\[128,4\] on cpu:1\. Move"
    with raises(ValueError, match=message):
        jax.grad(lambda lhs: fp8.matmul(lhs, far).sum())(near)


def test_a_program_may_hold_constants_of_other_devices():
    far, near = on_second_device(X.T), jax.device_put(X, jax.devices()[0])
    np.testing.assert_array_equal(jax.jit(lambda: fp8.matmul(near, far))(), fp8.matmul(X, X.T))


@pytest.mark.parametrize("number", [jnp.ones(3), np.ones((2, 2)), "2", 1.0, None], ids=str)
def test_no_number_of_experts(number):
    with raises(ValueError, match="^permute: num_experts must be an integer, at least 1; got "):
        moe.permute(X, CHOICES, number)
    with raises(ValueError, match="^route: top_k must be an integer, 1..num_experts; got "):
        moe.route(X, number)


def test_arrays_with_a_mask():
    masked = np.ma.masked_array(np.ones((2, 3), np.float32), mask=np.eye(2, 3))
    for call in (lambda: fp8.matmul(masked, X.T), lambda: fp8.quantize(masked)):
        with raises(TypeError, match="must be an array; got MaskedArray"):
            call()
