"""What the JIT opens besides its cache: NVRTC, and files of the dump."""

import os

import pytest
from ext_program import needs_nvrtc, run

from jax_fp8gemm._runtime import environment, extension

pytest.importorskip("jax_fp8gemm._ext")

pytestmark = needs_nvrtc


def test_a_fifo_is_no_nvrtc(tmp_path):
    fifo = tmp_path / "libnvrtc.so.13"
    os.mkfifo(fifo)
    code = """
try:
    ext.nvrtc_info()
except RuntimeError as error:
    print(error)
"""
    link = tmp_path / "link"
    link.symlink_to(fifo)
    for path in (fifo, link):
        status, output, _ = run(code, nvrtc_paths=[str(path)])
        assert status == 0 and f"{path}: is not a regular file" in output


def test_a_link_to_nvrtc_is_followed_and_a_fifo_beside_it_left_alone(tmp_path):
    (tmp_path / "libnvrtc.so").symlink_to(extension.nvrtc()[0])
    os.mkfifo(tmp_path / "libnvrtc-builtins.so.0")
    status, output, error = run(
        "print(*ext.nvrtc_info()[1:])", nvrtc_paths=[str(tmp_path / "libnvrtc.so")]
    )
    assert status == 0 and output.split() == [str(part) for part in extension.nvrtc()[1:]], error


_NAME = "quantize_row_bf16_e4m3"
_DUMP = """
ext.configure(source_dir={!r}, cache_dir="", nvrtc_paths={!r}, is_debug=False, dump_dir={!r})
ext.compile_quantize(QUANTIZE_CONFIG)
"""


def _dump(dump_dir):
    """Dumps one kernel; returns the warnings."""
    code = _DUMP.format(environment.source_dir(), environment.nvrtc_paths(), str(dump_dir))
    status, _, error = run(code)
    assert status == 0, error
    return error.splitlines()


@pytest.mark.parametrize("suffix", ["cu", "log", "cubin", "sass"])
def test_a_dump_is_not_written_through_a_link(tmp_path, suffix):
    target = tmp_path / "precious"
    target.write_text("precious")
    dump_dir = tmp_path / "dump"
    dump_dir.mkdir()
    (dump_dir / f"{_NAME}.{suffix}").symlink_to(target)
    assert _dump(dump_dir) == []
    assert target.read_text() == "precious"
    files = [path for path in dump_dir.iterdir() if path.suffix != ".sass"]
    assert len(files) == 3 and not any(path.is_symlink() for path in files)


def test_a_dump_is_not_written_through_a_hard_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / f"{_NAME}.log")
    assert _dump(tmp_path) == []
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_dump_waits_for_no_fifo(tmp_path):
    os.mkfifo(tmp_path / f"{_NAME}.cu")
    assert _dump(tmp_path) == []
    assert "quantize.cuh" in (tmp_path / f"{_NAME}.cu").read_text()


def test_a_dump_folder_is_no_link(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (warning,) = _dump(tmp_path / "link")
    assert "must be a folder and no symbolic link" in warning
    assert not list((tmp_path / "target").iterdir())
