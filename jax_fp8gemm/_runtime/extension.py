"""The compiled extension: registers its FFI targets and says whether they can run here.

The only module that imports the extension. Importing it opens neither the driver nor NVRTC, so it
works on any machine; `unavailable_reason` opens both, once.
"""

import functools
import re
from pathlib import Path

import jax
import jax.export

from jax_fp8gemm._runtime import environment, hopper
from jax_fp8gemm._runtime.warn import warn_caller

try:
    from jax_fp8gemm import _ext
except ImportError as error:
    _ext = None
    _ext_fault = str(error)

GEMM_TARGET = "jax_fp8gemm_gemm"
QUANTIZING_GEMM_TARGET = "jax_fp8gemm_quantizing_gemm"
GROUPED_GEMM_TARGET = "jax_fp8gemm_grouped_gemm"
GROUPED_GATED_GEMM_TARGET = "jax_fp8gemm_grouped_gated_gemm"
GROUPED_WGRAD_TARGET = "jax_fp8gemm_grouped_wgrad"
QUANTIZE_TARGET = "jax_fp8gemm_quantize"
SWIGLU_QUANTIZE_TARGET = "jax_fp8gemm_swiglu_quantize"
SWIGLU_GRAD_QUANTIZE_TARGET = "jax_fp8gemm_swiglu_grad_quantize"
WEIGHTED_SWIGLU_GRAD_QUANTIZE_TARGET = "jax_fp8gemm_weighted_swiglu_grad_quantize"
GATHER_QUANTIZE_TARGET = "jax_fp8gemm_gather_quantize"
COPY_ROWS_TARGET = "jax_fp8gemm_copy_rows"
SUM_ROWS_TARGET = "jax_fp8gemm_sum_rows"
# For a CPU. Exported programs have no call of it.
QUANTIZE_BLOCKS_TARGET = "jax_fp8gemm_quantize_blocks"

# For disabled_checks of jax.export.export(..., platforms=("cuda",)), which refuses unknown targets.
EXPORT_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in (
        GEMM_TARGET,
        QUANTIZING_GEMM_TARGET,
        GROUPED_GEMM_TARGET,
        GROUPED_GATED_GEMM_TARGET,
        GROUPED_WGRAD_TARGET,
        QUANTIZE_TARGET,
        GATHER_QUANTIZE_TARGET,
        SWIGLU_QUANTIZE_TARGET,
        SWIGLU_GRAD_QUANTIZE_TARGET,
        WEIGHTED_SWIGLU_GRAD_QUANTIZE_TARGET,
        COPY_ROWS_TARGET,
        SUM_ROWS_TARGET,
    )
)

cache_dir = ""  # set by _configure
has_cpu_targets = False  # set by register


class FallbackWarning(RuntimeWarning):
    """The reference runs where a user would expect the CUDA kernels; the message says why."""


def _configure() -> None:
    """Passes the environment's settings to the extension. Later changes have no effect."""
    global cache_dir
    cache_dir = environment.cache_dir()
    if _ext is None:
        return
    _ext.configure(
        source_dir=environment.source_dir(),
        cache_dir=cache_dir,
        nvrtc_paths=environment.nvrtc_paths(),
        is_debug=environment.is_debug(),
        dump_dir=environment.dump_dir(),
    )


# Whether it can run here


def _extension_fault() -> str | None:
    if _ext is None:
        return (
            f"the extension jax_fp8gemm._ext cannot be imported ({_ext_fault}). Install the "
            "package with pip; run from a checkout, it needs `pip install -e .`"
        )
    try:
        runtime = _runtime_api()
    except RuntimeError as error:
        return str(error)
    return _api_fault(_ext.XLA_FFI_API_MAJOR, _ext.XLA_FFI_API_MINOR, *runtime)


def _runtime_api() -> tuple[int, int]:
    """Returns XLA's FFI API version, which only a header tells. Raises: RuntimeError."""
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    try:
        text = header.read_text()
    except OSError as error:
        raise RuntimeError(f"jaxlib must have its header {header}; got {error.strerror}") from None
    versions = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", text)
    if len(versions) != 2:
        raise RuntimeError(f"{header} must define XLA_FFI_API_MAJOR and _MINOR; got {versions}")
    return int(versions[0]), int(versions[1])


def _api_fault(major: int, minor: int, runtime_major: int, runtime_minor: int) -> str | None:
    """Returns why XLA would refuse the extension, or None.

    XLA accepts handlers up to its own version. A newer one would stop its start-up.
    """
    if major == runtime_major and minor <= runtime_minor:
        return None
    return (
        f"the extension was built for XLA FFI API {major}.{minor} and this jaxlib provides "
        f"{runtime_major}.{runtime_minor}. Update jax and jaxlib, or build the package against "
        "this jaxlib (pip install --no-build-isolation)"
    )


def _device_fault() -> str | None:
    assert _ext is not None
    try:
        info = _ext.device_info()
    except RuntimeError as error:
        return str(error)
    if not info["devices"]:
        return f"needs an {hopper.ARCHITECTURE} device; got no GPU"
    for device in info["devices"]:
        if device["compute_capability"] != hopper.COMPUTE_CAPABILITY:
            major, minor = device["compute_capability"]
            found = f"{device['name']} (sm{major}{minor})"
            return f"needs an {hopper.ARCHITECTURE} device; got {found}"
    return None


def _nvrtc_fault() -> str | None:
    assert _ext is not None
    try:
        path, major, minor = _ext.nvrtc_info()
    except RuntimeError as error:
        return str(error)
    cuda_major, cuda_minor = _ext.device_info()["cuda_version"]
    if major > cuda_major:
        return (
            f"NVRTC {major}.{minor} ({path}) needs a driver for CUDA {major}; got one for CUDA "
            f"{cuda_major}.{cuda_minor}. Update the driver, or set JAX_FP8GEMM_NVRTC to the path "
            f"of libnvrtc.so.{cuda_major}"
        )
    return None


@functools.cache
def unavailable_reason() -> str | None:
    """Returns why the CUDA kernels cannot run on this machine, or None if they can."""
    reason = _extension_fault() or _device_fault() or _nvrtc_fault()
    if reason is None:
        check_cache_dir()
    return reason


def cache_fault(*, make: bool) -> str:
    """Returns why the cache folder cannot be used, or "". `make`: create it if missing."""
    return _ext.cache_fault(cache_dir, make=make) if _ext is not None and cache_dir else ""


@functools.cache
def check_cache_dir() -> None:
    """Creates the cache folder. If its kernels cannot be trusted, warns and goes on without one."""
    if fault := cache_fault(make=True):
        extension().disable_disk_cache()
        folder = environment.printable(cache_dir)
        warn_caller(
            f"jax_fp8gemm: cache folder {folder}: {fault}; kernels are kept in memory only. Set "
            "JAX_FP8GEMM_CACHE_DIR to a folder that only you can write.",
            RuntimeWarning,
        )


@functools.cache
def warn_once(reason: str) -> None:
    """Warns that the reference runs instead of the CUDA kernels, once for each reason.

    The warning points at the user's line: see `warn_caller`.
    """
    warn_caller(
        f"jax_fp8gemm: the CUDA kernels are off and the slow reference runs instead: {reason}",
        FallbackWarning,
    )


@functools.cache
def num_sms() -> int:
    """Returns the number of SMs that products may use: all, unless JAX_FP8GEMM_NUM_SMS says less.

    All are those of the first GPU, or of an H200 without a GPU.
    """
    limit = environment.max_sms()
    return _num_sms() if limit is None else min(limit, _num_sms())


def _num_sms() -> int:
    if _ext is None:
        return hopper.NUM_SMS
    try:
        devices = _ext.device_info()["devices"]
    except RuntimeError:
        return hopper.NUM_SMS
    return devices[0]["num_sms"] if devices else hopper.NUM_SMS


def register() -> None:
    """Registers the FFI targets with JAX, unless this jaxlib would refuse them."""
    global has_cpu_targets
    _configure()
    if _ext is not None and _extension_fault() is None:
        for target, stages in _ext.registrations().items():
            jax.ffi.register_ffi_target(target, stages, platform="CUDA")
        for target, handler in _ext.cpu_registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform="cpu")
        has_cpu_targets = True


def extension():
    """Returns the extension. Raises RuntimeError, with the reason, if it cannot be imported."""
    if _ext is None:
        raise RuntimeError(f"jax_fp8gemm: {_extension_fault()}")
    return _ext


# What the machine has. Each function raises RuntimeError, with the reason, where that is missing.


def gpu_names() -> list[str]:
    """Returns one "name (sm90, 132 SMs)" for each GPU that the driver shows."""
    return [
        "{} (sm{}{}, {} SMs)".format(d["name"], *d["compute_capability"], d["num_sms"])
        for d in extension().device_info()["devices"]
    ]


def driver_cuda_version() -> tuple[int, int]:
    """Returns the newest CUDA version that the driver supports."""
    return extension().device_info()["cuda_version"]


def nvrtc() -> tuple[str, int, int]:
    """Returns path, major and minor version of NVRTC."""
    return extension().nvrtc_info()


def api_versions() -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the FFI API versions of the extension and of this jaxlib."""
    ext = extension()
    return (ext.XLA_FFI_API_MAJOR, ext.XLA_FFI_API_MINOR), _runtime_api()


register()
