"""The configs that the package can ask for, in the harness's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsIndex

from jax_fp8gemm._data.activation import ClampedSwiglu
from jax_fp8gemm._tuning import all_kernels, copy_rows_config, quantize_config, sum_rows_config

NUM_SMS = 132  # H100 and H200 SXM
# Beside "silu", and with constants of either sign.
ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", ClampedSwiglu(7.0, alpha=1.702, up_offset=-0.5))


def config_text(config: Mapping[str, SupportsIndex]) -> str:
    """One config: sorted by name, as XLA sorts attributes."""
    return " ".join(f"{name}={int(config[name])}" for name in sorted(config))


def config_lists() -> str:
    """All configs, one a line."""
    gemm = all_kernels.gemm_kernels(NUM_SMS, all_formats=True, with_clusters=True)
    quantize = [
        config
        for e5m2, pow2_scale in all_kernels.formats(True)
        for config in quantize_config.kernel_configs(e5m2=e5m2, pow2_scale=pow2_scale)
    ]
    for activation in ACTIVATIONS:
        quantize += quantize_config.activation_configs(activation, e5m2=False, pow2_scale=False)
    lines = [f"gemm {config_text(config)}" for config in gemm]
    lines += [f"quantize {config_text(config)}" for config in quantize]
    lines += [f"copy_rows {config_text(config)}" for config in copy_rows_config.kernel_configs()]
    lines += [f"sum_rows {config_text(config)}" for config in sum_rows_config.kernel_configs()]
    return "\n".join(lines) + "\n"
