"""Compiles a file with the NVRTC that the package uses, and with the options of its kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path

OPTIONS = ("-std=c++20", "--gpu-architecture=sm_90a", "-default-device")


def compile_log(nvrtc_path: str, source: Path, include_folders: list[Path]) -> tuple[bool, str]:
    """Whether `source` compiles, and NVRTC's log."""
    nvrtc = _open(nvrtc_path)
    program, log_bytes = ctypes.c_void_p(), ctypes.c_size_t()
    text, name = source.read_bytes(), source.name.encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None) == 0
    flags = [*OPTIONS, *(f"--include-path={folder}" for folder in include_folders)]
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    result = nvrtc.nvrtcCompileProgram(program, len(flags), options)
    assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(log_bytes)) == 0
    log = ctypes.create_string_buffer(log_bytes.value)
    assert nvrtc.nvrtcGetProgramLog(program, log) == 0
    assert nvrtc.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    return result == 0, log.value.decode()


def _open(path: str) -> ctypes.CDLL:
    # NVRTC 13.0 looks for this one by name only.
    for builtins in Path(path).parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(path)
