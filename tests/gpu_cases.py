"""What the GPU tests share: operands, forced tile configs, poisoned results, child processes."""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import bit_model
import jax
import jax.numpy as jnp
import numpy as np
import reference
from jax import lax

import jax_fp8gemm as jf
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import choose, tile_config
from jax_fp8gemm._tuning.tile import TileConfig

IMPLEMENTATION = "cuda"
ROWS, SQUARE = (1, 128), (128, 128)
FAMILIES = {"1d2d": SQUARE, "1d1d": ROWS}  # name -> scale block of rhs
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
# Autotuning the dots that serve as reference costs more than the tests.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}
HERE = pathlib.Path(__file__).parent


def scaled(values: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> jf.ScaledArray:
    """A ScaledArray on the device."""
    return jf.ScaledArray(jnp.asarray(values), jnp.asarray(scale), block=block)


def on_host(x: jf.ScaledArray) -> tuple[np.ndarray, np.ndarray]:
    """Values and scale in NumPy, as the reference takes them."""
    return np.asarray(x.values), np.asarray(x.scale)


def operands(
    seed: int,
    shape: Sequence[int],
    rhs_block: tuple[int, int] = SQUARE,
    formats: tuple[np.dtype, np.dtype] = (E4M3, E4M3),
) -> tuple[jf.ScaledArray, jf.ScaledArray]:
    """Normal lhs (m, k) and rhs (n, k), quantised by the reference, on the device."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    normal = lambda rows: rng.standard_normal((rows, k), np.float32)
    lhs = scaled(*reference.quantize(normal(m), fmt=formats[0]), ROWS)
    return lhs, scaled(*reference.quantize(normal(n), rhs_block, fmt=formats[1]), rhs_block)


def multiply(lhs: jf.ScaledArray, rhs: jf.ScaledArray, out_dtype=jnp.float32, accum=None):
    """scaled_matmul by the kernel, or an error."""
    return jf.scaled_matmul(
        lhs, rhs, out_dtype=out_dtype, accumulate_into=accum, implementation=IMPLEMENTATION
    )


def rows_of(x: jf.ScaledArray, count: int) -> jf.ScaledArray:
    """The first rows of a 1x128 array."""
    return jf.ScaledArray(x.values[:count], x.scale[:count], block=x.block)


def bits(x: jax.Array) -> jax.Array:
    """The bits as integers, in which NaN equals itself and -0 differs from 0."""
    return lax.bitcast_convert_type(
        x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    )


@jax.jit
def count_different(x: jax.Array, y: jax.Array) -> jax.Array:
    """Number of elements whose bits differ."""
    return jnp.sum(bits(x) != bits(y), dtype=jnp.int32)


def assert_same(actual: jax.Array, expected: jax.Array, what: str = "") -> None:
    """Equal bits, compared on the device, explained on the host."""
    if actual.shape != expected.shape or count_different(actual, expected):
        reference.assert_same_bits(actual, expected, what)


# Tile configs

# For pytest.mark.parametrize: every config, those with clusters too, in each family.
FAMILY_CONFIGS = [
    (name, config)
    for name in FAMILIES
    for config in tile_config.configs(is_1d1d=name == "1d1d", with_clusters=True)
]


def precompile(folder: pathlib.Path) -> None:
    """Compiles every e4m3 kernel into the disk cache, on all cores.

    folder: of all processes of this test run. The first process compiles, the others wait for it.
    """
    with (folder / "precompiled").open("a+") as done:
        fcntl.flock(done, fcntl.LOCK_EX)
        done.seek(0)
        if done.read():
            return
        command = [sys.executable, "-P", "-m", "jax_fp8gemm", "precompile", "--clusters"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
        done.write("yes")


def compile_with(config: TileConfig | None, function: Callable, *args, **jit_options) -> Callable:
    """Compiles function(*args) with every product on `config`; None leaves the choice.

    A fresh function object, since jit would return what it compiled for another config. The
    lowered text must show the config in each custom call: a hook that does nothing would make
    every comparison of configs pass.
    """
    fresh = lambda *xs: function(*xs)
    forced = contextlib.nullcontext() if config is None else choose.override(config)
    with forced:
        lowered = jax.jit(fresh, **jit_options).lower(*args)
    targets = (
        extension.GEMM_TARGET,
        extension.QUANTIZING_GEMM_TARGET,
        extension.GROUPED_GEMM_TARGET,
        extension.GROUPED_WGRAD_TARGET,
    )
    calls = re.findall(rf"custom_call @(?:{'|'.join(targets)})\(.*", lowered.as_text())
    assert calls, "the kernel is not in the program"
    for field in dataclasses.fields(config) if config else ():
        entry = re.compile(rf"\b{field.name} = {int(getattr(config, field.name))} : i32")
        assert all(entry.search(call) for call in calls), (field.name, config, calls[0])
    return lowered.compile()


def run_poisoned(function: Callable, args: Sequence, out_type: jax.ShapeDtypeStruct, config=None):
    """function(*args) into a donated buffer full of 0xFF bytes (NaN), which it must overwrite."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[out_type.dtype.itemsize]
    ones = jnp.full(out_type.shape, jnp.iinfo(unsigned).max, unsigned)
    poison = lax.bitcast_convert_type(ones, out_type.dtype)
    address = poison.unsafe_buffer_pointer()
    compiled = compile_with(
        config, lambda poison, *xs: function(*xs), poison, *args, donate_argnums=0, keep_unused=True
    )
    out = compiled(poison, *args)
    assert out.unsafe_buffer_pointer() == address, "the poisoned buffer was not used"
    return out


# The model of the bits


def assert_model_predicts(out, lhs, rhs, *, accum=None, num_samples=512, seed=0, what="") -> None:
    """f32 `out` equals the bit model on random elements and on the corners."""
    m, n = out.shape
    rng = np.random.default_rng(seed)
    rows = np.concatenate([rng.integers(0, m, num_samples), [0, 0, m - 1, m - 1]])
    cols = np.concatenate([rng.integers(0, n, num_samples), [0, n - 1, 0, n - 1]])
    accum = None if accum is None else np.asarray(accum)[rows, cols]
    predicted = bit_model.gemm_elements(
        *on_host(lhs), *on_host(rhs), rows, cols, is_1d1d=rhs.block == ROWS, accum=accum
    )
    reference.assert_same_bits(np.asarray(out)[rows, cols], predicted, what)


# Child processes


def digest(*arrays: jax.Array) -> str:
    """SHA-256 of the bytes."""
    sha = hashlib.sha256()
    for x in arrays:
        sha.update(np.ascontiguousarray(np.asarray(x)).tobytes())
    return sha.hexdigest()


def thunks(folder: pathlib.Path) -> str:
    """What XLA wrote about the steps of the programs."""
    files = [path for path in folder.iterdir() if "thunk" in path.name]
    assert files, sorted(path.name for path in folder.iterdir())
    return "\n".join(path.read_text(errors="replace") for path in files)


def run_program(
    *arguments: str,
    program: str = "gpu_program.py",
    prefix: Sequence[str] = (),
    timeout: float = 400,
    **environment: str,
) -> subprocess.CompletedProcess:
    """Runs tests/<program> in a process of its own, beside this one on the GPU."""
    return subprocess.run(
        [*prefix, sys.executable, str(HERE / program), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
