"""backend_info: what the package found on this machine, for people to read."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import jax

from jax_fp8gemm._runtime import environment, extension
from jax_fp8gemm._runtime.html_table import html_table

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class BackendInfo:
    """What the package found on this machine. Prints as a table.

    `reason` says why the CUDA kernels are off, and is None where they run; the other fields
    describe each part, or say why it is missing.
    """

    gpu: str
    driver: str
    nvrtc: str
    ffi_api: str
    jax: str
    cache_dir: str
    reason: str | None

    @property
    def _kernels(self) -> str:
        return "on" if self.reason is None else f"off: {self.reason}"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "reason"]
        return [*rows, ("cuda kernels", self._kernels)]

    def __str__(self) -> str:
        return "\n".join(f"{name:<13} {value}" for name, value in self._rows())

    def __repr__(self) -> str:
        gpu = f", {self.gpu}" if self.reason is None else ""
        return f"<BackendInfo: CUDA kernels {self._kernels}{gpu}>"

    def _repr_html_(self) -> str:
        return html_table("BackendInfo", self._rows())


def backend_info() -> BackendInfo:
    """Says what the package found on this machine, and why the CUDA kernels are off if they are."""
    return BackendInfo(
        gpu=_describe(_gpu),
        driver=_describe(_driver),
        nvrtc=_describe(lambda: "{1}.{2} ({0})".format(*extension.nvrtc())),
        ffi_api=ffi_api(),
        jax=f"{jax.__version__} (backend: {jax.default_backend()})",
        cache_dir=_cache(),
        reason=extension.unavailable_reason() or _jax_fault(),
    )


def _describe(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except RuntimeError as error:
        return f"none: {error}"


def _gpu() -> str:
    return ", ".join(extension.gpu_names()) or "none"


def _driver() -> str:
    return "{} (CUDA {}.{})".format(_driver_version(), *extension.driver_cuda_version())


def _driver_version() -> str:
    """Returns the version of the kernel module. CUDA's driver API does not tell it."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(\.\d+)+)\s", _DRIVER_FILE.read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown version"


def ffi_api() -> str:
    """Says the FFI API versions of the extension and of this jaxlib, or why there are none."""
    return _describe(_ffi_api)


def _ffi_api() -> str:
    built, runtime = extension.api_versions()
    return "{}.{} (this jaxlib: {}.{})".format(*built, *runtime)


def _jax_fault() -> str | None:
    try:
        jax.devices("cuda")
    except RuntimeError:
        return "jax sees no NVIDIA GPU. Install jax[cuda13], and leave JAX_PLATFORMS unset"
    return None


def _cache() -> str:
    if not (cache_dir := extension.cache_dir):
        return "none: kernels are kept in memory only"
    name = environment.printable(cache_dir)
    is_writable = environment.is_writable(cache_dir)
    fault = extension.cache_fault(make=False)
    if not is_writable and (fault or not Path(cache_dir).is_dir()):
        return f"none: {name} cannot be written; kernels are kept in memory only"
    if fault:
        return f"none: {fault}; kernels are kept in memory only"
    kernels = f"{len(list(Path(cache_dir).glob('*.kernel')))} kernels"
    return f"{name} ({kernels}{'' if is_writable else ', read-only'})"
