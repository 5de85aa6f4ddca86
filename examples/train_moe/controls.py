"""Products that are expected to train worse than the package's: the controls of the evidence.

A control rounds operands as a coarser recipe would. Then it multiplies in bf16, which holds what
was rounded to 8 bits or fewer with an error far below that of the rounding. So it runs at the speed
of bf16. One control, no_promotion, multiplies in FP8 where no expert is chosen. One, bf16_again,
rounds nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8gemm import BF16, Recipe, matmul, ragged_dot

BLOCK = 128


class Format(NamedTuple):
    """A format of floating point: bits of its mantissa, exponent of its least normal, largest."""

    mantissa_bits: int
    least_exponent: int
    largest: float


E4M3, E5M2, E2M1 = Format(3, -6, 448.0), Format(2, -14, 57344.0), Format(1, 0, 6.0)


def to_format(x: jax.Array, kind: Format) -> jax.Array:
    """Returns f32 x, clipped to what a format holds and rounded to its nearest, ties to even.

    It does not convert to the format and back: XLA on a GPU may drop such a pair, and nothing is
    rounded.
    """
    x = jnp.clip(x, -kind.largest, kind.largest)
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=kind.mantissa_bits)
    spacing = 2.0 ** (kind.least_exponent - kind.mantissa_bits)  # below the least normal
    subnormal = jnp.round(x / spacing) * spacing
    return jnp.where(jnp.abs(x) < 2.0**kind.least_exponent, subnormal, normal)


def _quantized(x: jax.Array, axes: tuple[int, ...] | None, kind: Format = E4M3):
    """Returns f32 values of a format and a scale. Elements along `axes` share it; None: all do."""
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=axes, keepdims=True), 1e-30) / kind.largest
    return to_format(wide / scale, kind), scale


def _rounded(x: jax.Array, axes: tuple[int, ...] | None, kind: Format = E4M3) -> jax.Array:
    """Returns x rounded to a format, with scales as those of _quantized."""
    values, scale = _quantized(x, axes, kind)
    return (values * scale).astype(x.dtype)


def per_tensor(x: jax.Array, axis: int) -> jax.Array:
    """Returns x in e4m3 with one scale."""
    return _rounded(x, None)


def unscaled(x: jax.Array, axis: int) -> jax.Array:
    """Returns x in e4m3 as it is: small values vanish, large ones saturate."""
    return to_format(x.astype(jnp.float32), E4M3).astype(x.dtype)


def in_rows(x: jax.Array, axis: int, kind: Format = E4M3) -> jax.Array:
    """Returns x in a format with one scale for 128 elements along the contraction."""
    x = jnp.moveaxis(x, axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    return jnp.moveaxis(_rounded(blocks, (-1,), kind).reshape(x.shape), -1, axis)


def in_squares(x: jax.Array, axis: int) -> jax.Array:
    """Returns x in e4m3 with one scale for 128x128 elements of the last two dimensions."""
    m, n = x.shape[-2:]
    blocks = x.reshape(-1, m // BLOCK, BLOCK, n // BLOCK, BLOCK)
    return _rounded(blocks, (2, 4)).reshape(x.shape)


def by_fast_accumulation(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Returns lhs (m, k) times rhs (k, n), both with one scale, in e4m3.

    On a GPU XLA asks cuBLASLt for its fast accumulation, because the precision is the default: sums
    stay in the tensor core's few bits for all of k (--xla_gpu_enable_triton_gemm=false makes sure
    that it is cuBLASLt). Operands that have been rounded by per_tensor come back to the same e4m3.
    """
    (lhs, a), (rhs, b) = (_quantized(x, None) for x in (lhs, rhs))
    dot = jax.lax.dot_general(
        lhs.astype(jnp.float8_e4m3fn),
        rhs.astype(jnp.float8_e4m3fn),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return (dot * (a * b)).astype(jnp.bfloat16)


def as_it_is(x: jax.Array, axis: int) -> jax.Array:
    """Returns x."""
    return x


class Control(NamedTuple):
    """How a control rounds lhs, rhs and the cotangent dout of a product.

    Each is a function of an array and the axis of the contraction.

    Attributes:
      matmul: what multiplies (m, k) by (k, n).
      ragged_dot: what multiplies (m, k) by (g, k, n) in bf16, given the sizes (g,) of groups.
      jitter: initial values are moved at random by up to this share of themselves.
    """

    name: str
    lhs: Callable[[jax.Array, int], jax.Array]
    rhs: Callable[[jax.Array, int], jax.Array]
    dout: Callable[[jax.Array, int], jax.Array]
    matmul: Callable[[jax.Array, jax.Array], jax.Array] = partial(matmul, recipe=BF16)
    ragged_dot: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = partial(
        ragged_dot, recipe=BF16
    )
    jitter: float = 0.0

    def __repr__(self):
        return f"Control({self.name!r})"


_FP4, _E5M2 = (partial(in_rows, kind=kind) for kind in (E2M1, E5M2))
_ALL = (
    # bf16 from values that differ by less than bf16's rounding. Its gap is the noise of a pair.
    Control("bf16_again", as_it_is, as_it_is, as_it_is, jitter=2.0**-9),
    # A mantissa of two bits, and of one, beside three of e4m3: recipes that are somewhat worse.
    Control("e5m2", _E5M2, _E5M2, _E5M2),
    Control("fp4", _FP4, _FP4, _FP4),
    Control("per_tensor", per_tensor, per_tensor, per_tensor),
    Control("unscaled", unscaled, unscaled, unscaled),
    # As DEEPSEEK_V3, but for cotangents: its report saw training diverge with them in squares.
    Control("square_dout", in_rows, in_squares, in_squares),
    # As per_tensor, and sums of other products than those of experts are not promoted to f32.
    Control("no_promotion", per_tensor, per_tensor, per_tensor, by_fast_accumulation),
)
CONTROLS = {control.name: control for control in _ALL}


def with_tokamax(recipe):
    """Returns the recipe, or control, with tokamax's ragged_dot for grouped products in bf16.

    XLA's multiplies each row by the weights of every expert on a GPU, and leaves one product in g.
    Recipes in FP8 come back as they are.
    """
    if isinstance(recipe, Recipe):
        if recipe.is_fp8:
            return recipe
        recipe = Control("bf16", as_it_is, as_it_is, as_it_is)
    try:
        import tokamax
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"--ragged-dot tokamax needs {error.name}: pip install {error.name}"
        ) from None
    return recipe._replace(ragged_dot=partial(tokamax.ragged_dot, implementation="mosaic"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(control: Control, lhs, rhs, sizes):
    """Returns lhs (m, k) times rhs (k, n); with group sizes (g,), times rhs (g, k, n) by group."""
    return _multiply(control, control.lhs(lhs, -1), control.rhs(rhs, -2), sizes)


# Under jit, so that the layers of a model share one trace of each shape: a kernel of tokamax takes
# seconds to lower.
@partial(jax.jit, static_argnums=0)
def _multiply(control: Control, lhs, rhs, sizes):
    return control.matmul(lhs, rhs) if sizes is None else control.ragged_dot(lhs, rhs, sizes)


@partial(jax.jit, static_argnums=0)
def _gradient_of_lhs(control: Control, lhs, rhs, sizes, dout):
    if sizes is None:
        return control.matmul(dout, rhs.mT)
    return jax.vjp(lambda lhs: control.ragged_dot(lhs, rhs, sizes), lhs)[1](dout)[0]


@partial(jax.jit, static_argnums=0)
def _gradient_of_rhs(control: Control, lhs, rhs, sizes, dout):
    if sizes is None:
        return control.matmul(lhs.mT, dout)
    return jax.vjp(lambda rhs: control.ragged_dot(lhs, rhs, sizes), rhs)[1](dout)[0]


def _product_bwd(control: Control, operands, dout):
    lhs, rhs, sizes = operands
    to_lhs = lhs, control.rhs(rhs, -1), sizes, control.dout(dout, -1)
    to_rhs = control.lhs(lhs, -2), rhs, sizes, control.dout(dout, -2)
    return _gradient_of_lhs(control, *to_lhs), _gradient_of_rhs(control, *to_rhs), None


product.defvjp(lambda control, *operands: (product(control, *operands), operands), _product_bwd)


def dot_general(control: Control, lhs, rhs, dimension_numbers, **options):
    """Returns the product of a Linear: lhs (..., k) times rhs (k, n)."""
    if dimension_numbers != (((lhs.ndim - 1,), (0,)), ((), ())):
        raise ValueError(f"a control multiplies (..., k) by (k, n); got {dimension_numbers}")
    out = product(control, lhs.reshape(-1, lhs.shape[-1]), rhs, None)
    return out.reshape(*lhs.shape[:-1], -1)
