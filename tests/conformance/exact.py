"""Data that FP8 holds exactly, in the place of what tests draw.

Small integers: products of rows of them are exact in f32 too, so the tests' own tolerances stay.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The largest integer; a suite that multiplies products by products has a smaller one.
largest = 4
# Whether integers are made small, too: for suites where they are multiplied.
takes_integers = False


def exact(x: Any) -> Any:
    """Integers of at most largest, in the shape, dtype and kind of array of `x`."""
    dtype = getattr(x, "dtype", None)
    if dtype is not None and takes_integers and jnp.issubdtype(dtype, jnp.integer):
        return x % dtype.type(largest + 1)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return x
    xp = jnp if isinstance(x, jax.Array) else np
    wide = xp.asarray(x).astype(np.float32)
    # Not clipped: what a test cycles through stays as various as it can be.
    small = xp.fmod(xp.round(wide), largest + 1)
    return small.astype(dtype) if xp.ndim(x) else dtype.type(small)


def array_makers(module: Any) -> dict[str, Any]:
    """arange of a namespace (jnp or np), with exact values where they are floating."""

    def arange(*args, **kwargs):
        return exact(module.arange(*args, **kwargs))

    return {"arange": arange}


def make_generators_exact() -> None:
    """What JAX's test_util.rand_* return makes exact arrays; so does the generator of a test."""
    from jax._src import test_util as jtu

    make = jtu.JaxTestCase.rng
    jtu.JaxTestCase.rng = lambda test: ExactGenerator(make(test))

    for name in [name for name in vars(jtu) if name.startswith("rand_")]:
        setattr(jtu, name, _exact_factory(getattr(jtu, name)))


def _exact_factory(factory):
    def made(*settings, **more):
        draw = factory(*settings, **more)
        return lambda *args, **kwargs: exact(draw(*args, **kwargs))

    return made


def draw_float_dtypes() -> None:
    """JAX's test_util.sample_product draws from the combinations of our dtypes alone."""
    from jax._src import test_util as jtu

    sample = jtu.sample_product
    # Also preferred_element_type's values, and those of lhs_dtype; not tuples of dtypes.
    is_ours = lambda name, value: not name.endswith(("dtype", "_type")) or _is_float(value)

    def sample_floats(*groups, **axes):
        # Dicts of what goes together, and values of one parameter. All where none is ours.
        of_floats = lambda group: [x for x in group if all(is_ours(*item) for item in x.items())]
        groups = [of_floats(group) or group for group in map(list, groups)]
        axes = {name: list(values) for name, values in axes.items()}
        axes = {n: [x for x in values if is_ours(n, x)] or values for n, values in axes.items()}
        return sample(*groups, **axes)

    jtu.sample_product = sample_floats


def _is_float(dtype: Any) -> bool:
    return dtype is None or dtype in (jnp.bfloat16, jnp.float16, jnp.float32)


class ExactGenerator:
    """A NumPy generator whose floating values are exact."""

    def __init__(self, generator: Any):
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._generator, name)
        if name not in ("randn", "rand", "random", "uniform", "normal", "standard_normal"):
            return method
        # Uniform draws are mostly below one half: made larger, so that few round to zero.
        return lambda *args, **kwargs: exact(4 * np.asarray(method(*args, **kwargs)))
