from collections.abc import Iterable, Mapping
from os import PathLike
from typing import SupportsIndex, TypedDict

_Path = str | bytes | PathLike[str]

XLA_FFI_API_MAJOR: int
XLA_FFI_API_MINOR: int

class Device(TypedDict):
    name: str
    compute_capability: tuple[int, int]
    num_sms: int

class DeviceInfo(TypedDict):
    cuda_version: tuple[int, int]
    devices: list[Device]

class Report(TypedDict):
    name: str
    from_disk: bool
    registers: int
    spill_bytes: int
    cubin_bytes: int
    log: str

def registrations() -> dict[str, dict[str, object]]: ...
def cpu_registrations() -> dict[str, object]: ...
def device_info() -> DeviceInfo: ...
def nvrtc_info() -> tuple[str, int, int]: ...
def configure(
    *,
    source_dir: _Path,
    cache_dir: _Path,
    nvrtc_paths: Iterable[_Path],
    is_debug: bool,
    dump_dir: _Path,
) -> None: ...
def cache_fault(folder: _Path, *, make: bool) -> str: ...
def disable_disk_cache() -> None: ...
def compile_gemm(config: Mapping[str, SupportsIndex]) -> Report: ...
def compile_copy_rows(config: Mapping[str, SupportsIndex]) -> Report: ...
def compile_quantize(config: Mapping[str, SupportsIndex]) -> Report: ...
def compile_sum_rows(config: Mapping[str, SupportsIndex]) -> Report: ...
