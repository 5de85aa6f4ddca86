"""Random normal inputs."""

import functools

import jax
import jax.numpy as jnp


def normal(rows: int, columns: int, *, seed: int) -> jax.Array:
    """(rows, columns) bf16, standard normal."""
    num_elems = rows * columns
    return _cut(_pool(1 << max(0, num_elems - 1).bit_length(), seed), rows, columns)


@functools.lru_cache(maxsize=4)
def _pool(num_elems: int, seed: int) -> jax.Array:
    # One pool a power of two: the generator is slow to compile, a slice of its result is not.
    return jax.random.normal(jax.random.key(seed), (num_elems,), jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(pool: jax.Array, rows: int, columns: int) -> jax.Array:
    return pool[: rows * columns].reshape(rows, columns)
