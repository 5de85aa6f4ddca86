"""Meshes of four or eight devices, and the collectives of a program that runs on one."""

import math
import re

import jax
import pytest


def mesh(*axis_types, shape=(4,)):
    # conftest makes eight CPU devices: this skips only on a machine of fewer GPUs.
    if len(jax.devices()) < math.prod(shape):
        pytest.skip(f"needs {math.prod(shape)} devices")
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=axis_types)


def collectives(compiled):
    """["all-reduce f32[128,512]", ...], sorted."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\w+\[[\d,]*\])\S* ({names})(?:-start)?\(", compiled.as_text())
    return sorted(f"{name} {array}" for array, name in found)
