"""Where things are on this machine: kernel sources, compiled kernels, NVRTC.

The extension takes these variables when the package is imported:
    JAX_FP8GEMM_CACHE_DIR  folder of compiled kernels; empty: keep them in memory only
    JAX_FP8GEMM_NVRTC      path of libnvrtc.so; only that one is tried
    JAX_FP8GEMM_JIT_DEBUG  1: report each kernel on stderr (registers, spills, time, cache hits)
    JAX_FP8GEMM_DUMP_DIR   folder for source, log, cubin and SASS of each kernel

The first product that is lowered takes this one:
    JAX_FP8GEMM_NUM_SMS    the SMs that products use at most; collectives beside them have the rest
"""

import importlib.util
import os
from pathlib import Path


def source_dir() -> str:
    """Returns the folder of kernel sources, of the checkout or else of the installed package."""
    package = Path(__file__).parents[1]
    checkout = package.parent / "ffi" / "cuda"
    return str(checkout if checkout.is_dir() else package / "cuda")


def cache_dir() -> str:
    """Returns the cache folder, which need not exist, or "" for none."""
    if (value := os.environ.get("JAX_FP8GEMM_CACHE_DIR")) is not None:
        return os.path.abspath(os.path.expanduser(value)) if value else ""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "jax_fp8gemm") if os.path.isabs(base) else ""


def printable(path: str) -> str:
    """Returns the path with bytes that are not UTF-8 as \\xNN.

    Python holds such bytes as characters that no stream prints.
    """
    return os.fsencode(path).decode(errors="backslashreplace")


def is_writable(folder: str) -> bool:
    """Returns whether the folder, which need not exist, can be written to. Creates nothing."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def max_sms() -> int | None:
    """Returns how many SMs products use at most; None for all. Raises ValueError."""
    value = os.environ.get("JAX_FP8GEMM_NUM_SMS")
    if not value:
        return None
    # A cluster of CTAs takes up to 4.
    if not value.isascii() or not value.isdigit() or int(value) < 4:
        raise ValueError(f"JAX_FP8GEMM_NUM_SMS must be an integer of at least 4; got {value}")
    return int(value)


def nvrtc_paths() -> list[str]:
    """Returns where NVRTC may be, best first: JAX's CUDA wheels, the linker's path, the toolkit."""
    if value := os.environ.get("JAX_FP8GEMM_NVRTC"):
        return [os.path.abspath(value) if "/" in value else value]
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    toolkit = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    majors = _cuda_majors()
    wheels = [
        os.path.join(root, {13: "cu13", 12: "cuda_nvrtc"}[major], "lib", f"libnvrtc.so.{major}")
        for major in majors
        for root in roots
    ]
    sonames = [f"libnvrtc.so.{major}" for major in majors]
    installed = [os.path.join(toolkit, "lib64", soname) for soname in sonames]
    return [path for path in wheels if os.path.exists(path)] + sonames + installed


def _cuda_majors() -> list[int]:
    """Returns 13 and 12, the one of JAX's plugin first.

    Another package may bring the wheels of a newer CUDA, which the driver need not support.
    """
    is_jax = lambda major: importlib.util.find_spec(f"jax_cuda{major}_plugin") is not None
    return [12, 13] if is_jax(12) and not is_jax(13) else [13, 12]


def is_debug() -> bool:
    value = os.environ.get("JAX_FP8GEMM_JIT_DEBUG", "")
    return value.lower() not in ("", "0", "false", "no", "off")


def dump_dir() -> str:
    return os.path.expanduser(os.environ.get("JAX_FP8GEMM_DUMP_DIR", ""))
