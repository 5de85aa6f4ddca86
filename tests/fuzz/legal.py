"""Calls of every op that are legal: extents, dtypes and options drawn from the pools."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz import pools


class Draw:
    """Draws the parts of a legal call."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def extents(self, count: int, smallest: int = 0) -> list[int]:
        choices = [d for d in pools.EXTENTS[:-1] if d >= smallest]
        return [int(d) for d in self.rng.choice(choices, count)]

    def floats(self, *shape: int) -> jax.ShapeDtypeStruct:
        return pools.struct(shape, pools.FLOATS[self.rng.integers(3)])

    def sizes(self, g: int) -> jax.ShapeDtypeStruct:
        return pools.struct((g,), [jnp.int32, jnp.int8, jnp.uint32][self.rng.integers(3)])

    def options(self, *names: str) -> dict[str, Any]:
        """Some of these, each of its values."""
        kept = [name for name in names if self.rng.random() < 0.4]
        choose = lambda values: values[self.rng.integers(len(values))]
        return {name: choose(pools.OPTIONS[name]) for name in kept}


_PRODUCT = ("recipe", "precision", "preferred_element_type", "implementation", "out_sharding")


def _matmul(draw: Draw):
    b, m, n, k = draw.extents(4)
    lhs = [(m, k), (b, m, k), (k,), (1, m, k)][draw.rng.integers(4)]
    rhs = [(k, n), (b, k, n), (k,), (1, k, n)][draw.rng.integers(4)]
    if draw.rng.random() < 0.15:
        return [draw.floats(*lhs), pools.quantised((k, n), (128, 128))], draw.options(*_PRODUCT[:1])
    return [draw.floats(*lhs), draw.floats(*rhs)], draw.options(*_PRODUCT)


def _dot_general(draw: Draw):
    b, m, n, k = draw.extents(4)
    numbers, lhs, rhs = [
        ((((1,), (0,)), ((), ())), (m, k), (k, n)),
        ((((0,), (1,)), ((), ())), (k, m), (n, k)),
        ((((2,), (1,)), ((0,), (0,))), (b, m, k), (b, k, n)),
        ((((0, 2), (1, 0)), ((), ())), (b, m, k), (k, b, n)),
    ][draw.rng.integers(4)]
    return [draw.floats(*lhs), draw.floats(*rhs), numbers], draw.options(*_PRODUCT)


def _ragged_dot(draw: Draw):
    m, n, k = draw.extents(3)
    g = int(draw.rng.integers(1, 4))
    return [draw.floats(m, k), draw.floats(g, k, n), draw.sizes(g)], draw.options(*_PRODUCT)


def _ragged_dot_general(draw: Draw):
    m, n, k = draw.extents(3)
    g = int(draw.rng.integers(1, 4))
    numbers = jax.lax.RaggedDotDimensionNumbers
    if draw.rng.random() < 0.5:
        dims, rhs = numbers((((1,), (1,)), ((), ())), [0], [0]), (g, k, n)
    else:
        dims, rhs = numbers((((0,), (0,)), ((), ())), [0], []), (m, n)
    args = [draw.floats(m, k), draw.floats(*rhs), draw.sizes(g), dims]
    return args, draw.options(*_PRODUCT)


_QUANTIZE = ("dtype", "pow2_scale", "implementation")


def _quantize(draw: Draw):
    x = draw.floats(*draw.extents(int(draw.rng.integers(2, 4))))
    square = [dict(block=(128, 128), with_transpose=how) for how in (False, True, "only")]
    how = [{}, dict(axis=-2), *square]
    return [x], how[draw.rng.integers(len(how))] | draw.options(*_QUANTIZE)


def _quantize_ragged(draw: Draw):
    return [draw.floats(*draw.extents(2)), draw.sizes(2)], draw.options(*_QUANTIZE)


def _dequantize(draw: Draw):
    block = [(1, 128), (128, 128)][draw.rng.integers(2)]
    return [pools.quantised(draw.extents(2), block), pools.FLOATS[draw.rng.integers(3)]], {}


def _scaled_matmul(draw: Draw):
    m, n, k = draw.extents(3)
    block = [(1, 128), (128, 128)][draw.rng.integers(2)]
    args = [pools.quantised((m, k)), pools.quantised((n, k), block)]
    if draw.rng.random() < 0.3:
        accum = pools.struct((m, n), jnp.float32)
        return args, dict(accumulate_into=accum, out_dtype=jnp.float32)
    return args, draw.options("out_dtype", "implementation")


def _scaled_ragged_dot(draw: Draw):
    m, n, k = draw.extents(3)
    lhs = [(m, k), (2, m, k)][draw.rng.integers(2)]
    args = [pools.quantised(lhs), pools.quantised((2, n, k), (128, 128)), draw.sizes(2)]
    return args, draw.options("out_dtype", "implementation")


def _scaled_ragged_wgrad(draw: Draw):
    m, n = draw.extents(2)
    t = 128 * int(draw.rng.integers(0, 3))
    args = [pools.quantised((m, t)), pools.quantised((n, t)), draw.sizes(2)]
    return args, draw.options("out_dtype", "implementation")


def _experts(draw: Draw, d: int):
    (f,) = draw.extents(1)
    return [draw.floats(2, d, 2 * f), draw.floats(2, f, d)]


def _moe_mlp(draw: Draw):
    m, d = draw.extents(2)
    args = [draw.floats(m, d), *_experts(draw, d), draw.sizes(2)]
    return args, draw.options("recipe", "implementation")


def _moe_layer(draw: Draw):
    m, d = draw.extents(2)
    options = draw.options("recipe", "implementation", "capacity_factor")
    if draw.rng.random() < 0.5:
        router = pools.struct((m, 1), jnp.int32), draw.floats(m, 1)
    else:
        router, options = draw.floats(m, 2), options | dict(top_k=1)
        options |= draw.options("normalize", "scoring", "scale", "return_load")
        options |= dict(bias=draw.floats(2)) if draw.rng.random() < 0.5 else {}
    return [draw.floats(m, d), router, *_experts(draw, d)], options


def _permute(draw: Draw):
    m, d = draw.extents(2)
    return [draw.floats(m, d), pools.struct((m, 2), jnp.int32), int(draw.rng.integers(1, 9))], {}


def _unpermute(draw: Draw):
    m, d = draw.extents(2)
    order = pools.struct((m, 2), jnp.int32)
    return [draw.floats(2 * m, d), order, draw.floats(m, 2)], {}


def _route(draw: Draw):
    m, e = draw.extents(2, smallest=1)
    options = draw.options("normalize", "scoring", "scale", "return_load")
    if draw.rng.random() < 0.5:
        options |= dict(bias=draw.floats(e), n_group=1, topk_group=1)
    return [draw.floats(m, e), 1], options


CALLS: dict[str, Callable[[Draw], tuple[list[Any], dict[str, Any]]]] = {
    "matmul": _matmul,
    "dot_general": _dot_general,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot_general,
    "quantize": _quantize,
    "quantize_both": lambda draw: ([draw.floats(*draw.extents(2))], draw.options(*_QUANTIZE)),
    "quantize_ragged": _quantize_ragged,
    "dequantize": _dequantize,
    "scaled_matmul": _scaled_matmul,
    "scaled_ragged_dot": _scaled_ragged_dot,
    "scaled_ragged_wgrad": _scaled_ragged_wgrad,
    "moe_mlp": _moe_mlp,
    "moe_layer": _moe_layer,
    "permute": _permute,
    "unpermute": _unpermute,
    "route": _route,
}
