"""Random normal inputs, and the same quantised."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

import jax_fp8gemm
from jax_fp8gemm import ScaledArray


def normal(rows: int, columns: int, *, seed: int) -> jax.Array:
    """(rows, columns) bf16, standard normal."""
    num_elems = rows * columns
    return _cut(_pool(1 << max(0, num_elems - 1).bit_length(), seed), rows, columns)


def normal_groups(groups: int, rows: int, columns: int, *, seed: int) -> jax.Array:
    """(groups, rows, columns) bf16, standard normal."""
    return jnp.stack([normal(rows, columns, seed=seed + i) for i in range(groups)])


@functools.lru_cache(maxsize=4)
def _pool(num_elems: int, seed: int) -> jax.Array:
    # One pool a power of two: the generator is slow to compile, a slice of its result is not.
    return jax.random.normal(jax.random.key(seed), (num_elems,), jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(pool: jax.Array, rows: int, columns: int) -> jax.Array:
    return pool[: rows * columns].reshape(rows, columns)


_Quantizer = Callable[[jax.Array], ScaledArray]
_quantize_rows: _Quantizer = jax.jit(functools.partial(jax_fp8gemm.quantize, block=(1, 128)))
quantize_blocks: _Quantizer = jax.jit(functools.partial(jax_fp8gemm.quantize, block=(128, 128)))


def quantize_rows(x: jax.Array) -> ScaledArray:
    """Quantised with scale blocks (1, 128), its scale laid out as the kernel reads it."""
    return with_rows_minor(_quantize_rows(x))


def with_rows_minor(x: ScaledArray) -> ScaledArray:
    """`x` with the scales of neighbouring rows adjacent: XLA then adds no copy to the call."""
    last = x.scale.ndim - 1
    rows_minor = Format(Layout(major_to_minor=(last, *range(last))), x.scale.sharding)
    return ScaledArray(x.values, jax.device_put(x.scale, rows_minor))
