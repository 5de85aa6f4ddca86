"""Calls of every op on operands that follow from a seed: what record_ops.py records.

Operands are made of PCG64's raw bits by exact arithmetic, so they do not depend on the version of
NumPy. Ops run eagerly, so that JAX compiles once what several cases call; but a derivative is one
jitted program.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from record_h200 import _DATA as DATA
from record_h200 import FORMATS

import jax_fp8gemm as jf
from jax_fp8gemm import moe
from jax_fp8gemm._primitives import gather_quantize, quantize_ragged, swiglu_quantize

ROWS, SQUARE = (1, 128), (128, 128)
FAMILIES = {"1d2d": SQUARE, "1d1d": ROWS}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
SIZES = (3, 0, 130, 17, 40)  # of rows or tokens; ten more belong to no group
ACTIVATIONS: dict[str, Any] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
    "clamped": moe.ClampedSwiglu(10.0),
    "gpt-oss": moe.ClampedSwiglu(7.0, 1.702, 1.0),
}
_SPECIAL_BITS = np.asarray(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC12345, 0xFF812345, 0x80000001, 0x007FFFFF]
    + [0x00345678, 0xBFC00000, 0x7F7FFFFF, 0x00800000],
    np.uint32,
)

Bits = np.random.PCG64
Run = Callable[[str], Sequence[np.ndarray]]


def _words(bits: Bits, *shape: int) -> np.ndarray:
    """Random u32 words."""
    return (bits.random_raw(int(np.prod(shape))) >> np.uint64(32)).astype(np.uint32).reshape(shape)


def _normal(bits: Bits, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Sums of eight bytes: near normal, of variance 0.67."""
    raw = bits.random_raw(int(np.prod(shape))).astype("<u8").view(np.uint8)
    sums = raw.reshape(*shape, 8).astype(np.int32).sum(-1)
    return ((sums - 1020) / 256).astype(np.float32).astype(dtype)


def _sparsely(bits: Bits, x: np.ndarray, period: int) -> np.ndarray:
    """f32 x with a special number at random places, one in `period`."""
    where = _words(bits, *x.shape) % np.uint32(period) == 0
    special = _SPECIAL_BITS[_words(bits, *x.shape) % np.uint32(len(_SPECIAL_BITS))]
    return np.where(where, special, x.view(np.uint32)).astype(np.uint32).view(np.float32)


# Quantised operands


def _with_exponents(bits: Bits, shape, first: int, last: int) -> np.ndarray:
    """Positive f32 with biased exponents in a range."""
    words = _words(bits, *shape)
    exponents = np.uint32(first) + _words(bits, *shape) % np.uint32(last - first + 1)
    return ((words & np.uint32(0x7FFFFF)) | (exponents << np.uint32(23))).view(np.float32)


def _scaled(kind: str, bits: Bits, shape, fmt, block) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales. wild: some NaN and Inf among the codes. Others: extreme scales."""
    if kind in DATA:
        return DATA[kind](bits, shape, fmt, block)
    values, scale = DATA["codes"](bits, shape, fmt, block)
    if kind == "wild":
        codes = values.view(np.uint8)
        is_wild = _words(bits, *shape) % np.uint32(1024) == 0
        special = np.asarray([0x7F, 0xFF, 0x7C, 0xFC, 0x7C, 0xFC], np.uint8)
        chosen = special[_words(bits, *shape) % np.uint32(len(special))]
        return np.where(is_wild, chosen, codes).view(fmt), scale
    if kind == "special scales":
        return values, _sparsely(bits, scale, 40)
    exponents = {"underflow": (45, 70), "overflow": (180, 200)}[kind]
    return values, _with_exponents(bits, scale.shape, *exponents)


def _accum(bits: Bits, *shape: int) -> np.ndarray:
    return _sparsely(bits, _normal(bits, shape) * np.float32(64), 16)


def _on_device(operands: Any) -> Any:
    """The arrays of NumPy as JAX's, with the same bits."""
    return jax.tree.map(jnp.asarray, operands)


def _multiply(op, lhs, rhs, accum, implementation: str, out_dtype: Any, *groups, block=SQUARE):
    """One program: the op on values and scales."""
    scaled = lambda q, block: jf.ScaledArray(*q, block=block)
    how: dict[str, Any] = dict(out_dtype=out_dtype, implementation=implementation)
    if accum is not None:
        how["accumulate_into"] = accum
    return op(scaled(lhs, ROWS), scaled(rhs, block), *groups, **how)


def _dense(kind, lhs, rhs, family, out, is_accumulated, shape, bits, implementation):
    m, n, k = shape
    block = FAMILIES[family]
    operands = (
        _scaled(kind, bits, (m, k), FORMATS[lhs], ROWS),
        _scaled(kind, bits, (n, k), FORMATS[rhs], block),
        _accum(bits, m, n) if is_accumulated else None,
    )
    run = lambda *xs: _multiply(jf.scaled_matmul, *xs, implementation, DTYPES[out], block=block)
    return [run(*_on_device(operands))]


def _grouped(kind, out, is_masked, bits, implementation):
    g, n, k = len(SIZES), 136, 264
    lhs = _scaled(kind, bits, (200, k), FORMATS["e4m3"], ROWS)
    rhs = [_scaled(kind, bits, (n, k), FORMATS["e4m3"], SQUARE) for _ in range(g)]
    rhs = [np.stack(xs) for xs in zip(*rhs, strict=True)]
    sizes = np.asarray(SIZES, np.int32)
    if is_masked:
        lhs, sizes = [x.reshape(g, 40, -1) for x in lhs], np.minimum(sizes, 40)
    run = lambda lhs, rhs, sizes: _multiply(
        jf.scaled_ragged_dot, lhs, rhs, None, implementation, DTYPES[out], sizes
    )
    return [run(*_on_device((lhs, rhs, sizes)))]


def _wgrad(kind, out, is_accumulated, bits, implementation):
    g, m, n, t = len(SIZES), 72, 136, 768
    operands = (
        _scaled(kind, bits, (m, t), FORMATS["e4m3"], ROWS),
        _scaled(kind, bits, (n, t), FORMATS["e4m3"], ROWS),
        _accum(bits, g, m, n) if is_accumulated else None,
    )
    run = lambda lhs, rhs, accum, sizes: _multiply(
        jf.scaled_ragged_wgrad, lhs, rhs, accum, implementation, DTYPES[out], sizes, block=ROWS
    )
    return [run(*_on_device((*operands, np.asarray(SIZES, np.int32))))]


# Quantisers


def _any_float(bits: Bits, dtype: Any, *shape: int) -> np.ndarray:
    """Every pattern of bits: NaN, Inf and every exponent. Every fourth row has normal numbers."""
    words, normal = _words(bits, *shape), _normal(bits, shape, dtype)
    wild = words.astype(np.uint16).view(dtype) if dtype != np.float32 else words.view(np.float32)
    with np.errstate(invalid="ignore"):  # what reading a signalling NaN sets
        is_special = ~np.isfinite(wild)
    wild = np.where((np.arange(shape[0]) % 2 == 0)[:, None] & is_special, dtype(1), wild)
    return np.where((np.arange(shape[0]) % 4 == 3)[:, None], normal, wild)


def _groups() -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(SIZES, np.int32), np.asarray([4], np.int32)


def _args(fmt: str, pow2: bool, implementation: str) -> Any:
    return dict(dtype=FORMATS[fmt], pow2_scale=pow2, implementation=implementation)


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _quantize(dtype, fmt, pow2, bits, implementation):
    x = _any_float(bits, dtype, 200, 264)
    args = _args(fmt, pow2, implementation)
    run = lambda x, *groups: (
        jf.quantize(x, **args),
        jf.quantize(x, block=SQUARE, with_transpose=True, **args),
        jf.quantize_both(x, **args),
        quantize_ragged.ragged_columns(x, *groups, **args),
    )
    return _leaves(run(*_on_device((x, *_groups()))))


def _gather(dtype, fmt, is_weighted, bits, implementation):
    x = _any_float(bits, dtype, 200, 264)
    rows = (_words(bits, 210) % np.uint32(204)).astype(np.int32) - 2
    weights = _sparsely(bits, _normal(bits, (210,)), 16) if is_weighted else None
    run = lambda *xs: gather_quantize.gather_quantize(
        *xs, mode="row_column", **_args(fmt, False, implementation)
    )
    return _leaves(run(*_on_device((x, rows, weights, *_groups()))))


def _gather_fp8(fmt, is_weighted, bits, implementation):
    values, scale = _scaled("special scales", bits, (200, 264), FORMATS[fmt], ROWS)
    rows = (_words(bits, 210) % np.uint32(200)).astype(np.int32)
    weights = _normal(bits, (210,)) if is_weighted else None
    run = lambda values, scale, *xs: gather_quantize.gather_quantize(
        jf.ScaledArray(values, scale), *xs, mode="column", **_args(fmt, False, implementation)
    )
    return _leaves(run(*_on_device((values, scale, rows, weights, *_groups()))))


# Activations


def _gates(kind: str, dtype: Any, bits: Bits, m: int, f: int) -> list[np.ndarray]:
    """gate, up and dh. "one": one element of a scale block is not zero, so that its scale tells
    most bits of it; gates are of any size up to 2^7."""
    if kind == "normal":
        gate, up, dh = (_normal(bits, (m, f)) for _ in range(3))
        return [(gate * 4).astype(dtype), up.astype(dtype), dh.astype(dtype)]
    if kind == "wild":
        return [_any_float(bits, dtype, m, f) for _ in range(3)]
    sign = (_words(bits, m, f) & np.uint32(0x80000000)).view(np.float32)
    gate = np.copysign(_with_exponents(bits, (m, f), 110, 133), sign).astype(dtype)
    is_one = np.arange(f) % 128 == 77
    rest = lambda: np.where(is_one, _with_exponents(bits, (m, f), 120, 130), 0).astype(dtype)
    return [gate, rest(), rest()]


def _activation(name, kind, dtype, fmt, pow2, bits, implementation):
    m, f = (256, 1024) if kind == "one" else (210, 200)
    gate, up, dh = _gates(kind, dtype, bits, m, f)
    args = dict(activation=ACTIVATIONS[name], with_columns=kind != "one")
    args |= _args(fmt, pow2, implementation)
    run = lambda gate_up, dh, *groups: (
        swiglu_quantize.swiglu_quantize(gate_up, *groups, **args),
        swiglu_quantize.swiglu_grad_quantize(gate_up, dh, *groups, **args),
    )
    gate_up = np.concatenate([gate, up], axis=1)
    return _leaves(run(*_on_device((gate_up, dh, *_groups()))))


# Differentiable ops


def _vjp(function: Callable, operands: Sequence[np.ndarray], bits: Bits, implementation: str):
    function = functools.partial(function, implementation=implementation)
    shape = jax.eval_shape(function, *operands)
    dout = _normal(bits, shape.shape, shape.dtype)

    def run(dout, *operands):
        out, pull = jax.vjp(function, *operands)
        return out, pull(dout)

    return _leaves(jax.jit(run)(dout, *operands))


def _matmul(dtype, recipe, bits, implementation):
    operands = _normal(bits, (200, 264), dtype), _normal(bits, (264, 136), dtype)
    return _vjp(functools.partial(jf.matmul, recipe=recipe), operands, bits, implementation)


def _ragged_dot(recipe, bits, implementation):
    operands = _normal(bits, (200, 264), jnp.bfloat16), _normal(bits, (5, 264, 136), jnp.bfloat16)
    sizes = jnp.asarray(SIZES, jnp.int32)
    function = lambda lhs, rhs, **how: jf.ragged_dot(lhs, rhs, sizes, recipe=recipe, **how)
    return _vjp(function, operands, bits, implementation)


def _moe_mlp(recipe, bits, implementation):
    shapes = (200, 264), (5, 264, 272), (5, 136, 264)
    operands = [_normal(bits, shape, jnp.bfloat16) for shape in shapes]
    sizes = jnp.asarray(SIZES, jnp.int32)
    function = lambda *xs, **how: moe.moe_mlp(*xs, sizes, recipe=recipe, **how)
    return _vjp(function, operands, bits, implementation)


# All


def _named() -> dict[str, Callable]:
    cases: dict[str, Callable] = {}
    small, tall = (24, 136, 520), (200, 264, 392)
    outs = (("f32", False), ("bf16", False), ("f32", True))
    how = lambda out, is_accumulated: "accumulated" if is_accumulated else out

    def dense(kind, lhs, rhs, family, out, is_accumulated, shape=small):
        name = f"{family} {lhs}*{rhs} {kind} {how(out, is_accumulated)} {'x'.join(map(str, shape))}"
        args = kind, lhs, rhs, family, out, is_accumulated, shape
        cases[name] = functools.partial(_dense, *args)

    for family in FAMILIES:
        for kind in ("normal", "codes", "cancelling"):
            for out in outs[1:]:
                dense(kind, "e4m3", "e4m3", family, *out)
        for kind in ("wild", "underflow", "overflow", "special scales"):
            for out in outs:
                dense(kind, "e4m3", "e4m3", family, *out)
                dense(kind, "e5m2", "e5m2" if family == "1d2d" else "e4m3", family, *out)
        for kind in ("special scales", "underflow"):
            dense(kind, "e4m3", "e4m3", family, *outs[2], tall)
    for kind, out in product(("normal", "wild", "underflow"), DTYPES):
        for is_masked in (False, True):
            name = f"grouped {'masked' if is_masked else 'rows'} {kind} {out}"
            cases[name] = functools.partial(_grouped, kind, out, is_masked)
    for kind, out in product(("normal", "wild", "special scales"), outs):
        cases[f"grouped weight gradient {kind} {how(*out)}"] = functools.partial(_wgrad, kind, *out)
    numpy_dtypes = {"f32": np.float32, "bf16": jnp.bfloat16}
    for (out, dtype), fmt in product(numpy_dtypes.items(), FORMATS):
        for pow2 in (False, True):
            name = f"quantize {out} {fmt}{' pow2' * pow2}"
            cases[name] = functools.partial(_quantize, dtype, fmt, pow2)
        for is_weighted in (False, True):
            name = f"gather {out} {fmt}{' weighted' * is_weighted}"
            cases[name] = functools.partial(_gather, dtype, fmt, is_weighted)
    for fmt, is_weighted in product(FORMATS, (False, True)):
        name = f"gather fp8 {fmt}{' weighted' * is_weighted}"
        cases[name] = functools.partial(_gather_fp8, fmt, is_weighted)
    for name in ACTIVATIONS:
        for kind, (out, dtype) in product(("normal", "wild"), numpy_dtypes.items()):
            key = f"{name} {kind} {out}"
            cases[key] = functools.partial(_activation, name, kind, dtype, "e4m3", False)
        cases[f"{name} one f32"] = functools.partial(
            _activation, name, "one", np.float32, "e4m3", False
        )
        cases[f"{name} e5m2 pow2"] = functools.partial(
            _activation, name, "normal", np.float32, "e5m2", True
        )
    recipes = {"deepseek_v3": jf.DEEPSEEK_V3, "hybrid": jf.HYBRID}
    for name, recipe in recipes.items():
        for out, dtype in numpy_dtypes.items():
            cases[f"matmul {name} {out}"] = functools.partial(_matmul, dtype, recipe)
        cases[f"ragged_dot {name}"] = functools.partial(_ragged_dot, recipe)
        cases[f"moe_mlp {name}"] = functools.partial(_moe_mlp, recipe)
    return cases


def all_cases() -> dict[str, Run]:
    """name -> run(implementation) -> results."""

    def seeded(name: str, case: Callable) -> Run:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        return lambda implementation: [np.asarray(x) for x in case(Bits(seed), implementation)]

    return {name: seeded(name, case) for name, case in _named().items()}
