"""JAX's compilation cache finds the programs of partitioned ops, and no others for them."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from xla_options import QUICK_FLAGS

import jax_fp8gemm
from jax_fp8gemm import quantize
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding import cache_tag

_PROGRAM = pathlib.Path(__file__).parents[1] / "cache_program.py"
PROGRAMS = ("shard_map", "jit", "jit_without_address", "other_parameters")


def run_process(folder: pathlib.Path) -> dict[str, tuple[str, str]]:
    """(hit or miss, a sum of the result) of each program, in a process of its own."""
    flags = " ".join(["--xla_force_host_platform_device_count=4", *QUICK_FLAGS])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-W", "ignore", str(_PROGRAM), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: (found, result) for name, found, result in lines}


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    first, second = run_process(tmp_path), run_process(tmp_path)
    assert first.keys() == set(PROGRAMS)
    assert [found for found, _ in first.values()] == ["cache_misses"] * 4
    # The address of a callback is part of a key, unless JAX is told to leave it out.
    is_found = {name: found == "cache_hits" for name, (found, _) in second.items()}
    assert is_found == dict.fromkeys(PROGRAMS, True) | {"jit": False}
    for name in PROGRAMS:
        assert first[name][1] == second[name][1]
    assert first["other_parameters"][1] != first["jit"][1] == first["jit_without_address"][1]


def key_text(function, platform="cpu"):
    """What of a program the cache sees without the address of the callback."""
    sharding = NamedSharding(mesh(AxisType.Auto), P("x"))
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=sharding)
    lowered = jax.jit(lambda x: function(x)).trace(x).lower(lowering_platforms=(platform,))
    text, count = re.subn(r'backend_config = "\d+"', "", lowered.as_text())
    assert count > 0, text
    return text


def test_a_key_depends_on_parameters():
    same, again, other = (
        key_text(functools.partial(quantize, pow2_scale=is_pow2))
        for is_pow2 in (False, False, True)
    )
    assert same == again != other


def test_a_key_depends_on_the_implementation(monkeypatch):
    # As on a machine where the kernels run, and on one where they cannot.
    texts = set()
    for reason in (None, "no driver"):
        monkeypatch.setattr(
            "jax_fp8gemm._primitives.fallback.unusable_reason", lambda reason=reason: reason
        )
        monkeypatch.setattr(extension, "warn_once", lambda reason: None)
        texts.add(key_text(quantize, platform="cuda"))
    assert len(texts) == 2


def test_a_key_depends_on_the_sources(monkeypatch):
    before = key_text(quantize)
    monkeypatch.setattr(cache_tag, "_sources_digest", lambda: b"of another version")
    assert key_text(quantize) != before


def test_the_sources_are_those_of_every_folder():
    package = os.path.dirname(jax_fp8gemm.__file__)
    found = {
        os.path.join(folder, file)
        for folder, _, files in os.walk(package)
        for file in files
        if file.endswith(".py")
    }
    assert {os.path.dirname(path) for path in found} > {package, os.path.join(package, "_ops")}
    assert set(map(str, cache_tag._sources())) == found


def test_a_parameter_without_a_repr_of_its_own_is_refused():
    with pytest.raises(AssertionError, match="object at 0x"):
        cache_tag.tag([jnp.ones(())], object())
