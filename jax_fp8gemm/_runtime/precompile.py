"""Compiles kernels without XLA, for `python -m jax_fp8gemm precompile`. Needs NVRTC, but no GPU."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

from jax_fp8gemm._runtime import extension


@dataclass(frozen=True)
class CompileReport:
    """What the compilation of one kernel took and gave.

    Attributes:
      name: of the kernel.
      cached: whether the kernel came from the disk cache.
      seconds: duration of the call.
      registers: of a thread.
      spill_bytes: spill stores and loads.
      warnings: lines of ptxas's log that report lost performance.
      cubin_bytes: size of the cubin.
    """

    name: str
    cached: bool
    seconds: float
    registers: int
    spill_bytes: int
    warnings: tuple[str, ...]
    cubin_bytes: int


def compile_gemm(config: Mapping[str, SupportsIndex]) -> CompileReport:
    """Compiles the GEMM kernel of a config (`TileConfig.attributes`), or finds it in the cache.

    Raises:
      ValueError: no kernel can have this config.
      RuntimeError: no NVRTC, or the kernel does not compile; carries NVRTC's log.
    """
    ext = extension.extension()
    return _compile(lambda: ext.compile_gemm(dict(config)))


def compile_quantize(config: Mapping[str, SupportsIndex]) -> CompileReport:
    """Does the same for the quantise kernel of a config (`quantize_config.attributes`)."""
    ext = extension.extension()
    return _compile(lambda: ext.compile_quantize(dict(config)))


def compile_copy_rows(config: Mapping[str, SupportsIndex]) -> CompileReport:
    """Does the same for the kernel that copies rows (`copy_rows_config.attributes`)."""
    ext = extension.extension()
    return _compile(lambda: ext.compile_copy_rows(dict(config)))


def compile_sum_rows(config: Mapping[str, SupportsIndex]) -> CompileReport:
    """Does the same for the kernel that adds rows (`sum_rows_config.attributes`)."""
    ext = extension.extension()
    return _compile(lambda: ext.compile_sum_rows(dict(config)))


def _compile(compile_kernel: Callable[[], Mapping[str, Any]]) -> CompileReport:
    extension.check_cache_dir()
    start = time.perf_counter()
    report = compile_kernel()
    seconds = time.perf_counter() - start
    lines = report["log"].splitlines()
    return CompileReport(
        name=report["name"],
        cached=report["from_disk"],
        seconds=seconds,
        registers=report["registers"],
        spill_bytes=report["spill_bytes"],
        # C75xx: setmaxnreg ignored, wgmma serialised.
        warnings=tuple(x.strip() for x in lines if re.search(r"\bC75\d\d\b|\bwarning\b", x)),
        cubin_bytes=report["cubin_bytes"],
    )
