"""Entries of the disk cache whose checksum is right and whose sizes are not."""

import pytest
from ext_program import needs_nvrtc, run
from kernel_file import forge, sizes

pytest.importorskip("jax_fp8gemm._ext")


pytestmark = needs_nvrtc

# In a process of its own: reading beyond a buffer may end it.
_COMPILE = """
report = ext.compile_quantize(QUANTIZE_CONFIG)
print(report["from_disk"], report["cubin_bytes"])
"""


def _compile(cache_dir):
    status, output, error = run(_COMPILE, cache_dir)
    assert status == 0, error
    from_disk, cubin_bytes = output.split()
    return from_disk == "True", int(cubin_bytes)


@pytest.fixture(scope="module")
def good_entry(tmp_path_factory):
    """An entry as the cache writes it: its name, its bytes, and the size of its cubin."""
    folder = tmp_path_factory.mktemp("cache")
    from_disk, cubin_bytes = _compile(folder)
    assert not from_disk
    (entry,) = folder.iterdir()
    assert sizes(entry.read_bytes())["image_bytes"] == cubin_bytes
    return entry.name, entry.read_bytes(), cubin_bytes


def test_the_forger_knows_the_checksum(good_entry, tmp_path):
    name, data, cubin_bytes = good_entry
    assert forge(data) == data
    # One byte of the log counted as one of the image: all that a reader can ask of sizes.
    moved = {key: sizes(data)[key] + by for key, by in (("log_bytes", -1), ("image_bytes", 1))}
    (tmp_path / name).write_bytes(forge(data, **moved))
    assert _compile(tmp_path) == (True, cubin_bytes + 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda size: dict(image_bytes=size["image_bytes"] + 1),
        lambda size: dict(image_bytes=size["image_bytes"] - 1),
        lambda size: dict(image_bytes=2**40),
        lambda size: dict(image_bytes=2**64 - 1),
        lambda size: dict(name_bytes=2**63),
        lambda size: dict(name_bytes=2**64 - size["log_bytes"] - 64),
        # The three sizes add up to the right one, modulo 2^64.
        lambda size: dict(name_bytes=0, log_bytes=2**63, image_bytes=2**63 + sum(size.values())),
        lambda size: dict(name_bytes=2**64 - 1, image_bytes=sum(size.values()) + 1, log_bytes=0),
        lambda size: dict(name_bytes=sum(size.values()), log_bytes=0, image_bytes=1),
    ],
    ids=["more", "fewer", "2^40", "2^64", "name", "name_wraps", "sum_wraps", "names_wrap", "one"],
)  # fmt: skip
def test_sizes_that_are_not_those_of_the_file_are_not_believed(good_entry, tmp_path, change):
    name, data, cubin_bytes = good_entry
    (tmp_path / name).write_bytes(forge(data, **change(sizes(data))))
    assert _compile(tmp_path) == (False, cubin_bytes)
    assert _compile(tmp_path) == (True, cubin_bytes)
