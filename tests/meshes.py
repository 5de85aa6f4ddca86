"""Meshes of four devices."""

import jax
import pytest


def mesh(*axis_types, shape=(4,)):
    # conftest makes four CPU devices: this skips only on a machine of fewer GPUs.
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=axis_types)
