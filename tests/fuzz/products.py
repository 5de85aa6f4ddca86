"""Random products of every op against float64, within what f32 accumulation and the last rounding
may do; quantisation and routing exactly.

Each op has few shapes, dtypes and recipes, so that a program is compiled once and run many times.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import moe_cases
import numpy as np
import reference

import jax_fp8gemm as fp8
from jax_fp8gemm import moe

# Of a dtype: the relative error of a rounding, and the smallest subnormal number.
ROUNDING = {
    jnp.dtype(jnp.bfloat16): (2.0**-8, 2.0**-133),
    jnp.dtype(jnp.float16): (2.0**-11, 2.0**-24),
    jnp.dtype(jnp.float32): (2.0**-24, 2.0**-149),
}
RECIPES = {
    fp8.DEEPSEEK_V3: {},
    fp8.HYBRID: dict(bwd=reference.E5M2),
    fp8.Recipe(fwd="e5m2", pow2_scale=True): dict(fwd=reference.E5M2, pow2=True),
    fp8.Recipe(wgrad="bf16"): dict(fp8_drhs=False),
    fp8.Recipe(wgrad_lhs_block=(128, 128)): dict(drhs_lhs_block=(128, 128)),
}
SHAPES = ((3, 5, 7), (8, 130, 128), (70, 24, 260), (130, 8, 1))  # m, n, k
SIZES = (0, 20, 3, 41)  # of groups, of at most 70 rows


@dataclasses.dataclass(frozen=True)
class Sum:
    """What a product should be, and the sum of the magnitudes that it adds."""

    value: np.ndarray
    magnitude: np.ndarray
    length: int

    @staticmethod
    def of(lhs: np.ndarray, rhs: np.ndarray) -> "Sum":
        return Sum(lhs @ rhs, np.abs(lhs) @ np.abs(rhs), lhs.shape[-1])

    def fault(self, found: Any) -> str | None:
        """What is wrong with a result in f32 or rounded from f32."""
        last, smallest = ROUNDING[jnp.dtype(found.dtype)]
        found = np.asarray(found, np.float64)
        # A sum in f32 of as many terms, in any order, and a few roundings of scales.
        bound = (self.length + 16) * 2.0**-24 * self.magnitude
        bound += last * (np.abs(self.value) + bound) + 2 * smallest
        wrong = ~(np.abs(found - self.value) <= bound)
        if found.shape != self.value.shape:
            return f"shape {found.shape}, expected {self.value.shape}"
        if not wrong.any():
            return None
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        return f"{found[at]} at {at}, expected {self.value[at]} to {bound[at]}; {wrong.sum()} wrong"


def random_array(rng: np.random.Generator, *shape: int, dtype: Any = None) -> np.ndarray:
    """Normal values, of one scale or of many, or small integers, some of them zero."""
    x = rng.normal(size=shape)
    kind = rng.integers(4)
    if kind == 0:
        x *= np.exp2(rng.integers(-8, 6, shape))
    elif kind == 1:
        x = np.round(3 * x)
    elif kind == 2:
        x *= rng.random(shape) < 0.1
    return x.astype(np.dtype(dtype or jnp.float32))


def _choose(rng: np.random.Generator, values: Any) -> Any:
    return list(values)[rng.integers(len(values))]


def _first(faults: Any) -> str | None:
    return next((f"{name}: {fault}" for name, fault in faults if fault is not None), None)


@functools.cache
def _vjp(op: Callable[..., jax.Array], recipe: fp8.Recipe) -> Any:
    def run(lhs, rhs, dout, *rest):
        out, pullback = jax.vjp(lambda lhs, rhs: op(lhs, rhs, *rest, recipe=recipe), lhs, rhs)
        return out, *pullback(dout)

    return jax.jit(run)


def _sums(
    lhs,
    rhs,
    dout,
    *,
    fwd=reference.E4M3,
    bwd=reference.E4M3,
    pow2=False,
    fp8_drhs=True,
    drhs_lhs_block=(1, 128),
):
    """out, dlhs and drhs as reference.matmul_vjp has them, with their magnitudes."""
    fake = functools.partial(reference.fake_quantize, pow2=pow2)
    weights = fake(rhs, (128, 128), fmt=fwd)
    if fp8_drhs:
        columns = fake(lhs.T, drhs_lhs_block, fmt=fwd), fake(dout, axis=-2, fmt=bwd)
    else:
        in_bf16 = lambda x: x.astype(jnp.bfloat16).astype(np.float64).T
        columns = in_bf16(lhs), in_bf16(dout)
    yield Sum.of(fake(lhs, fmt=fwd), weights)
    yield Sum.of(fake(dout, fmt=bwd), weights.T)
    yield Sum.of(columns[0], columns[1].T)


def matmul(rng: np.random.Generator) -> str | None:
    """The product and both gradients."""
    m, n, k = _choose(rng, SHAPES)
    recipe, dtype = _choose(rng, RECIPES), _choose(rng, (jnp.float32, jnp.bfloat16))
    operands = [random_array(rng, *s, dtype=dtype) for s in ((m, k), (k, n), (m, n))]
    found = _vjp(fp8.matmul, recipe)(*operands)
    sums = _sums(*operands, **RECIPES[recipe])
    names = ("out", "dlhs", "drhs")
    return _first((n, s.fault(x)) for n, s, x in zip(names, sums, found, strict=True))


def dot_general(rng: np.random.Generator) -> str | None:
    """A batch of products, transposed; no gradients."""
    m, n, k = _choose(rng, SHAPES)
    lhs, rhs = random_array(rng, 2, k, m), random_array(rng, n, 2, k)
    found = _dot_general(lhs, rhs)
    quantised = [reference.fake_quantize(x.T) for x in lhs]
    weights = [reference.fake_quantize(rhs[:, i].T, (128, 128)) for i in range(2)]
    return _first((str(i), Sum.of(quantised[i], weights[i]).fault(found[i])) for i in range(2))


@jax.jit
def _dot_general(lhs, rhs):
    return fp8.dot_general(lhs, rhs, (((1,), (2,)), ((0,), (1,))))


def _group_problem(rng: np.random.Generator):
    m, n, k = 70, *_choose(rng, ((5, 7), (130, 128)))
    sizes = rng.permutation(SIZES) if rng.random() < 0.7 else rng.integers(-3, 60, len(SIZES))
    return m, n, k, sizes.astype(np.int32), reference.row_ranges(sizes, m)


def ragged_dot(rng: np.random.Generator) -> str | None:
    """The product of each group and both gradients; zeros elsewhere."""
    m, n, k, sizes, ranges = _group_problem(rng)
    recipe = _choose(rng, RECIPES)
    lhs, rhs = random_array(rng, m, k), random_array(rng, len(sizes), k, n)
    dout = random_array(rng, m, n)
    out, dlhs, drhs = map(np.asarray, _vjp(fp8.ragged_dot, recipe)(lhs, rhs, dout, sizes))
    for i, (start, end) in enumerate(ranges):
        rows = slice(start, end)
        sums = _sums(lhs[rows], rhs[i], dout[rows], **RECIPES[recipe])
        parts = (("out", out[rows]), ("dlhs", dlhs[rows]), ("drhs", drhs[i]))
        faults = ((f"{n} of {i}", s.fault(x)) for (n, x), s in zip(parts, sums, strict=True))
        if (fault := _first(faults)) is not None:
            return fault
    rest = ranges[-1][1]
    return "a row of no group" if out[rest:].any() or dlhs[rest:].any() else None


_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


@jax.jit
def _ragged_contraction(lhs, rhs, sizes):
    return fp8.ragged_dot_general(lhs, rhs, sizes, _OVER_ROWS)


def ragged_dot_general(rng: np.random.Generator) -> str | None:
    """The contraction of the rows of each group."""
    m, n, k, sizes, ranges = _group_problem(rng)
    lhs, rhs = random_array(rng, m, k), random_array(rng, m, n)
    out = _ragged_contraction(lhs, rhs, sizes)
    columns = functools.partial(reference.fake_quantize, axis=-2)
    return _first(
        (str(i), Sum.of(columns(lhs[a:b]), columns(rhs[a:b]).T).fault(out[i]))
        for i, (a, b) in enumerate(ranges)
    )


_quantize = jax.jit(fp8.quantize, static_argnames=("block", "axis", "dtype", "pow2_scale"))


def quantize(rng: np.random.Generator) -> str | None:
    """Bit by bit, of values that may be NaN, Inf or subnormal."""
    x = random_array(rng, *_choose(rng, SHAPES)[:2])
    if rng.random() < 0.3:
        x.ravel()[rng.integers(x.size)] = _choose(rng, (np.nan, np.inf, -np.inf, 1e-40, 3e38))
    how: dict[str, Any] = _choose(rng, (dict(axis=-1), dict(axis=-2), dict(block=(128, 128))))
    fmt, pow2 = _choose(rng, (reference.E4M3, reference.E5M2)), bool(rng.random() < 0.5)
    found = _quantize(x, dtype=fmt, pow2_scale=pow2, **how)
    values, scale = reference.quantize(x, fmt=fmt, pow2=pow2, **how)
    return _same_bits(("values", found.values, values), ("scale", found.scale, scale))


_quantize_ragged = jax.jit(fp8.quantize_ragged)


def quantize_ragged(rng: np.random.Generator) -> str | None:
    """Bit by bit."""
    m, _, k, sizes, _ = _group_problem(rng)
    x = random_array(rng, m, k)
    found = _quantize_ragged(x, sizes)
    values, scale = reference.quantize_ragged(x, sizes)
    return _same_bits(("values", found.values, values), ("scale", found.scale, scale))


def _same_bits(*pairs: tuple[str, Any, Any]) -> str | None:
    try:
        for what, found, expected in pairs:
            reference.assert_same_bits(found, expected, what)
    except AssertionError as error:
        return str(error)
    return None


_scaled_matmul = jax.jit(functools.partial(fp8.scaled_matmul, out_dtype=jnp.float32))


def scaled_matmul(rng: np.random.Generator) -> str | None:
    """1d2d and 1d1d."""
    m, n, k = _choose(rng, SHAPES)
    block = _choose(rng, ((1, 128), (128, 128)))
    lhs = reference.quantize(random_array(rng, m, k))
    rhs = reference.quantize(random_array(rng, n, k), block, fmt=reference.E5M2)
    operands = fp8.ScaledArray(*lhs), fp8.ScaledArray(*rhs, None, block)
    truth = Sum.of(reference.dequantize(*lhs), reference.dequantize(*rhs, block).T)
    return truth.fault(_scaled_matmul(*operands))


_moe_mlp = jax.jit(moe.moe_mlp)


def moe_mlp(rng: np.random.Generator) -> str | None:
    """The experts' results, by the distance that their tests allow."""
    m, d, f, g = 40, 128, 96, 3
    sizes = rng.integers(0, 20, g).astype(np.int32)
    x, dout = random_array(rng, m, d), np.zeros((m, d), np.float32)
    w_gate_up = random_array(rng, g, d, 2 * f) * np.float32(d**-0.5)
    w_down = random_array(rng, g, f, d) * np.float32(f**-0.5)
    found = np.asarray(_moe_mlp(x, w_gate_up, w_down, sizes))
    expected = moe_cases.truth((x, w_gate_up, w_down, dout), sizes)[0]
    distance = reference.calc_diff(found, expected)
    # A rounding of h that falls otherwise moves a value by 2^-4 of itself.
    return None if distance < 1e-4 else f"distance {distance}"


@functools.partial(jax.jit, static_argnums=1)
def _dispatch(logits, top_k, x):
    indices, weights = moe.route(logits, top_k)
    rows, sizes, order = moe.permute(x, indices, logits.shape[1])
    return indices, weights, rows, sizes, order, moe.unpermute(rows, order, weights)


def dispatch(rng: np.random.Generator) -> str | None:
    """route, permute and unpermute: the weighted copies of a row add up to it."""
    m, e, top_k = 24, 8, 2
    # No -0.0, which lax.top_k takes for less than 0.0.
    logits, x = random_array(rng, m, e) + np.float32(0), random_array(rng, m, 16)
    indices, weights, rows, sizes, order, out = map(np.asarray, _dispatch(logits, top_k, x))
    if not np.array_equal(indices, np.argsort(-logits, axis=1, kind="stable")[:, :top_k]):
        return "other experts than those of the largest logits"
    if not np.array_equal(sizes, np.bincount(indices.ravel(), minlength=e)):
        return "sizes of groups"
    if not np.array_equal(rows[order], np.repeat(x[:, None], top_k, axis=1)):
        return "rows out of order"
    expert = np.repeat(np.arange(e), sizes)
    if not np.array_equal(expert[order], indices):
        return "rows of other experts"
    close = np.allclose(out, x, rtol=1e-5, atol=1e-6) and np.allclose(weights.sum(1), 1, atol=1e-6)
    return None if close else "weighted sum"


OPS = (
    *(matmul, matmul, matmul, dot_general, ragged_dot, ragged_dot, ragged_dot_general),
    *(quantize, quantize_ragged, scaled_matmul, moe_mlp, dispatch),
)


def random_product(rng: np.random.Generator) -> tuple[str, str | None]:
    """Which op ran, and what is wrong with what it gave."""
    op = OPS[rng.integers(len(OPS))]
    return op.__name__, op(rng)
