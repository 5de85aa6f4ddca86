"""What the disk cache removes: after a while, and beyond a size. Never what is in use."""

import os
import time

import pytest
from ext_program import needs_nvrtc, run, start

pytest.importorskip("jax_fp8gemm._ext")

pytestmark = needs_nvrtc

_HOUR = 60 * 60
_DAY = 24 * _HOUR
_KEY = "0123456789abcdef" * 2
_MIB = 1 << 20

_COMPILE = """
print(ext.compile_quantize(dict(QUANTIZE_CONFIG, mode={mode}))["from_disk"])
"""


def _compile(cache_dir, mode=0):
    """Whether the kernel came from the disk."""
    status, output, error = run(_COMPILE.format(mode=mode), cache_dir)
    assert (status, error) == (0, "")
    return output.strip() == "True"


@pytest.fixture
def cache(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


def _put(cache, name, age, num_bytes=100):
    """A file of the cache, of that age in seconds; it takes no room."""
    path = cache / name
    with open(path, "wb") as file:
        file.truncate(num_bytes)
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_orphans_and_kernels_long_unused_go(cache):
    gone = [
        _put(cache, f"quantize_row-{_KEY}.kernel.123.456.tmp", 2 * _HOUR),
        _put(cache, f"fp8_gemm_1d2d-{_KEY}.kernel", 31 * _DAY),
    ]
    kept = [
        _put(cache, f"quantize_row-{_KEY}.kernel.124.456.tmp", _HOUR // 2),
        _put(cache, f"fp8_gemm_1d1d-{_KEY}.kernel", 29 * _DAY),
        # Not ours, though the folder is.
        _put(cache, "notes.tmp", 99 * _DAY),
        _put(cache, "popcorn.kernel", 99 * _DAY),
        _put(cache, f"quantize-{_KEY}.kernel.txt", 99 * _DAY),
        _put(cache, f"quantize-{_KEY[1:]}g.kernel", 99 * _DAY),
    ]
    (cache / f"folder-{_KEY}.kernel").mkdir()
    assert not _compile(cache)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)
    assert len(list(cache.iterdir())) == len(kept) + 2


def test_the_cache_has_at_most_256_mib(cache):
    # From the oldest to the newest, 310 MiB in all.
    paths = [
        _put(cache, f"kernel_{days}-{_KEY}.kernel", days * _DAY, 31 * _MIB)
        for days in range(20, 10, -1)
    ]
    assert not _compile(cache)
    assert [path.exists() for path in paths] == [False] * 2 + [True] * 8
    assert sum(path.stat().st_size for path in cache.iterdir()) <= 256 * _MIB
    assert _compile(cache)


def test_a_kernel_in_use_is_not_old(cache):
    assert not _compile(cache)
    (entry,) = cache.iterdir()
    for age, is_dated_anew in ((_DAY // 2, False), (29 * _DAY, True)):
        then = time.time() - age
        os.utime(entry, (then, then))
        assert _compile(cache)
        assert (entry.stat().st_mtime > then + 1) == is_dated_anew
    assert not _compile(cache, mode=1)  # which cleans
    assert entry.exists()


def test_reading_does_not_clean(cache):
    assert not _compile(cache)
    orphan = _put(cache, f"quantize_row-{_KEY}.kernel.123.456.tmp", 2 * _HOUR)
    assert _compile(cache)
    assert orphan.exists()


def test_processes_clean_while_others_write(cache):
    """Each cleans after its first kernel; all find their kernels there in the end."""
    for i in range(300):
        _put(cache, f"kernel_{i}-{_KEY}.kernel", (31 if i % 2 else 1) * _DAY, 2 * _MIB)
        _put(cache, f"kernel_{i}-{_KEY}.kernel.{i}.1.tmp", 2 * _HOUR)
    modes = range(4)
    processes = [start(_COMPILE.format(mode=mode), cache) for mode in modes]
    assert [process.wait(60) for process in processes] == [0] * len(modes)
    names = [path.name for path in cache.iterdir()]
    assert not [name for name in names if name.endswith(".tmp")]
    # 150 of 2 MiB each are not too old, and 128 fit.
    assert 120 <= len([name for name in names if name.startswith("kernel_")]) < 128
    assert all(_compile(cache, mode) for mode in modes)
