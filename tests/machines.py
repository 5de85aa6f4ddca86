"""Machines that the extension is made to see, and answers that outlive no test."""

import pytest

from jax_fp8gemm._runtime import extension

_ext = pytest.importorskip("jax_fp8gemm._ext")


@pytest.fixture(autouse=True)
def fresh_answers():
    """Each test asks anew; nothing that it was told outlives it."""
    caches = (
        extension.unavailable_reason,
        extension.warn_once,
        extension.num_sms,
        extension.check_cache_dir,
    )
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    extension._configure()


def device(name, compute_capability):
    return dict(name=name, compute_capability=compute_capability, num_sms=108)


def pretend(monkeypatch, *devices, cuda_version=(13, 0), nvrtc=("libnvrtc.so.13", 13, 0)):
    """Makes the extension see this machine."""
    info = dict(cuda_version=cuda_version, devices=list(devices))
    monkeypatch.setattr(_ext, "device_info", lambda: info)
    monkeypatch.setattr(_ext, "nvrtc_info", lambda: nvrtc)


H200 = device("NVIDIA H200", (9, 0))
