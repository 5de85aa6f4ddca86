"""What the environment says: which NVRTC, which cache folder, where the sources are."""

from pathlib import Path

from jax_fp8gemm import _backend_info, _environment


def test_the_environment_picks_one_nvrtc(monkeypatch):
    monkeypatch.setenv("JAX_FP8GEMM_NVRTC", "/some/libnvrtc.so")
    assert _environment.nvrtc_paths() == ["/some/libnvrtc.so"]
    monkeypatch.delenv("JAX_FP8GEMM_NVRTC")
    assert "libnvrtc.so.13" in _environment.nvrtc_paths()


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", "/a")
    assert _environment.cache_dir() == "/a"
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", "")
    assert _environment.cache_dir() == ""
    assert "memory only" in _backend_info.backend_info().cache_dir
    monkeypatch.delenv("JAX_FP8GEMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert _environment.cache_dir() == "/x/jax_fp8gemm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert _environment.cache_dir() == "/h/.cache/jax_fp8gemm"


def test_the_kernel_sources_are_found():
    names = {path.name for path in Path(_environment.source_dir()).glob("*.cuh")}
    assert {"gemm.cuh", "quantize.cuh"} <= names
