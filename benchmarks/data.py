"""Random normal inputs, and the same quantised."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

import jax_fp8gemm
from jax_fp8gemm import ScaledArray

# Drawn numbers; arrays repeat them. Odd, so that rows and groups begin at different ones.
_POOL_SIZE = (1 << 22) + 1


def normal(rows: int, columns: int, *, seed: int) -> jax.Array:
    """(rows, columns) bf16, standard normal."""
    return _repeat(_pool(seed), (rows, columns))


def normal_groups(groups: int, rows: int, columns: int, *, seed: int) -> jax.Array:
    """(groups, rows, columns) bf16, standard normal."""
    return _repeat(_pool(seed), (groups, rows, columns))


@functools.lru_cache(maxsize=8)
def _pool(seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (_POOL_SIZE,), jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def _repeat(pool: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    num_elems = math.prod(shape)
    times = -(-num_elems // pool.size)
    return jnp.tile(pool, times)[:num_elems].reshape(shape)


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
