"""What JAX may change: names that are gone, and the package imported twice."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import without_annotation_checks

import jax_fp8gemm
from jax_fp8gemm._runtime import jax_drift

TESTS = Path(__file__).parents[1]
# Each private name, and what is left of products over several devices without it.
GONE = {
    "jax._src.dispatch.prim_requires_devices_during_lowering": (
        r"quantize: jit over 2 devices must have a JAX that can partition the op; got jax .*\. The "
        r"package is tested with jax 0\.10\.2 to .*: install one of these, or a newer jax_fp8gemm\."
    ),
    "jax._src.config.eager_constant_folding": "same",
    "jax._src.config.traceback_in_locations_limit": "same",
    "jax._src.export._export.deserialization_registry": None,  # of a second import alone
    "jax._src.interpreters.batching.BatchTracer": None,  # of jax_fp8gemm.qwix alone, see test_qwix
    "jax._src.mesh.get_concrete_mesh": "same",  # an error then leaves out the mesh of jax.set_mesh
}


def private_names() -> set[str]:
    """Those of the package's sources."""
    sources = Path(jax_fp8gemm.__file__).parent.rglob("*.py")
    return {name for path in sources for name in re.findall(r"jax\._src[.\w]+", path.read_text())}


def test_every_private_name_is_guarded():
    assert private_names() == set(GONE)


@pytest.fixture(scope="module")
def without_each():
    """What the package does without each private name."""
    names = [name for name, mesh in GONE.items() if mesh]
    command = [sys.executable, "-P", str(TESTS / "drift_program.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", [name for name, mesh in GONE.items() if mesh])
def test_a_private_name_that_is_gone(without_each, name):
    found = without_each[name]
    assert (found["eager"], found["grad"]) == ("same", "same")
    assert re.fullmatch(GONE[name], found["mesh"]), found


@pytest.mark.parametrize("path", jax_drift._NEEDED)
def test_an_undocumented_name_that_is_gone(monkeypatch, path):
    owner, _, name = path.rpartition(".")
    monkeypatch.delattr(jax_drift.optional(owner), name)
    message = (
        rf"jax_fp8gemm: jax must have {re.escape(path)}; got jax {re.escape(jax.__version__)}\. "
        r"The package is tested with jax 0\.10\.2 to [\d.]+: install one of these, or a newer"
    )
    with pytest.raises(ImportError, match=message):
        importlib.reload(jax_drift)


def test_a_module_that_is_gone():
    assert jax_drift.optional("jax._src.no_module.name") is None
    assert jax_drift.optional("jax.numpy.no_module.name", 3) == 3


def test_a_second_import_takes_over(monkeypatch):
    """After one that failed half way, or where somebody emptied sys.modules."""
    first = [name for name in sys.modules if name.split(".")[0] == "jax_fp8gemm"]
    for name in first:
        monkeypatch.delitem(sys.modules, name)
    registered = jax_drift.optional("jax._src.export._export.deserialization_registry")
    name = "jax_fp8gemm.ScaledArray"
    monkeypatch.setitem(registered, name, registered[name])
    # beartype finds what it made of a hint, as tuple[ScaledArray, ...], by its text: that of the
    # first class.
    with without_annotation_checks():
        second = importlib.import_module("jax_fp8gemm")
        x = second.quantize(jnp.ones((4, 256)))
    assert second.ScaledArray is not jax_fp8gemm.ScaledArray
    blob = jax.export.export(jax.jit(second.dequantize))(x).serialize()
    np.testing.assert_array_equal(jax.export.deserialize(blob).call(x), np.ones((4, 256)))
