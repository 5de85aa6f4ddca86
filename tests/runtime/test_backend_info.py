"""What `info` tells of a machine."""

import subprocess
import sys

import jax
import pytest
from machines import H200, fresh_answers, pretend

from jax_fp8gemm._runtime import backend_info

_ext = pytest.importorskip("jax_fp8gemm._ext")
__all__ = ["fresh_answers"]  # a fixture of all tests here


def test_info_prints_every_part_and_the_reason():
    command = [sys.executable, "-P", "-m", "jax_fp8gemm", "info"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [line.split("  ")[0] for line in output.splitlines()]
    assert names == ["gpu", "driver", "nvrtc", "ffi_api", "jax", "cache_dir", "cuda kernels"]
    assert f"{_ext.XLA_FFI_API_MAJOR}.{_ext.XLA_FFI_API_MINOR} (this jaxlib: " in output
    assert jax.__version__ in output
    reason = backend_info.backend_info().reason
    assert ("off: " + reason if reason else "on") in output


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
         "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (a@b)"
         "\nGCC version:  gcc version 12.2.0", "580.65.06"),
        ("", "unknown version"),
        (None, "unknown version"),
    ],
)  # fmt: skip
def test_backend_info_tells_what_the_machine_has(monkeypatch, tmp_path, text, version):
    pretend(monkeypatch, H200)
    monkeypatch.setattr(backend_info, "_DRIVER_FILE", tmp_path / "version")
    if text is not None:
        (tmp_path / "version").write_text(text)
    info = backend_info.backend_info()
    assert info.gpu == "NVIDIA H200 (sm90, 108 SMs)"
    assert info.driver == f"{version} (CUDA 13.0)"
    assert info.nvrtc == "13.0 (libnvrtc.so.13)"


def test_repr_is_one_line_and_a_notebook_shows_a_table_of_escaped_text():
    parts = dict.fromkeys(["driver", "nvrtc", "ffi_api", "jax", "cache_dir"], "")
    on = backend_info.BackendInfo(gpu="NVIDIA H200 (sm90, 132 SMs)", **parts, reason=None)
    assert repr(on) == "<BackendInfo: CUDA kernels on, NVIDIA H200 (sm90, 132 SMs)>"
    off = backend_info.BackendInfo(gpu="none: <no driver>", **parts, reason="a&b")
    assert repr(off) == "<BackendInfo: CUDA kernels off: a&b>"
    table = off._repr_html_()
    assert "<tr><th>gpu</th><td>none: &lt;no driver&gt;</td></tr>" in table
    assert "<tr><th>cuda kernels</th><td>off: a&amp;b</td></tr>" in table
