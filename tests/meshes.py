"""Meshes of four or eight devices, and the collectives of a program that runs on one."""

import math
import re

import jax
import pytest

_NAMES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def mesh(*axis_types, shape=(4,)):
    # conftest makes eight CPU devices: this skips only on a machine of fewer GPUs.
    if len(jax.devices()) < math.prod(shape):
        pytest.skip(f"needs {math.prod(shape)} devices")
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=axis_types)


def all_gpus(*axis_types):
    """Returns a mesh of all GPUs, or of the largest power of two of them.

    With two axis types, the second axis has two GPUs.
    """
    num = 1 << len(jax.devices()).bit_length() - 1
    if num == 1:
        # What one GPU computes is tested elsewhere; here it is what moves between several.
        pytest.skip("needs two GPUs; got one")
    return mesh(*axis_types, shape=(num,) if len(axis_types) == 1 else (num // 2, 2))


def collectives(compiled):
    """["all-reduce f32[128,512]", ...], sorted: one entry for each array, also of combined ones.

    On a CPU XLA moves FP8 as f16, which no test has: it is told here as f8e4m3fn.
    """
    return sorted(f"{name} {array}" for name, array in _moved(compiled.as_text()))


def collectives_outside_loops(compiled):
    """The same, of the program without the bodies of its loops."""
    text = compiled.as_text()
    return sorted(f"{name} {array}" for name, array in _moved(text[text.index("\nENTRY") :]))


def _moved(text):
    # The results of asynchronous ones are those of their -done.
    for types, name in re.findall(rf" = (.+?) ({_NAMES})(?:-done)?\(", text):
        arrays = re.findall(r"(\w+)(\[[\d,]*\])", types)
        # Of an all-to-all the kinds of parts that a device sends.
        for dtype, shape in sorted(set(arrays)) if name == "all-to-all" else arrays:
            is_fp8 = dtype == "f16" and jax.default_backend() == "cpu"
            yield name, f"{'f8e4m3fn' if is_fp8 else dtype}{shape}"
