"""What the import of the package adds to that of JAX."""

import json
import pkgutil
import subprocess
import sys

import pytest

import jax_fp8gemm

# The package is imported three times. From the second time on its bytecode is in a file. The calls
# of the third time are counted: they are the same on every machine, and seconds are not.
_PROGRAM = """
import importlib, json, sys
import jax

before = set(sys.modules)
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
num_calls = 0

def count(frame, event, argument):
    global num_calls
    num_calls += event in ("call", "c_call")

for i in range(3):
    for name in [name for name in sys.modules if name.partition(".")[0] == "jax_fp8gemm"]:
        del sys.modules[name]
    sys.setprofile(count if i == 2 else None)
    importlib.import_module("jax_fp8gemm")
    sys.setprofile(None)
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([num_calls, sorted(added)]))
"""


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """Calls of functions during the import, and the packages that it brought."""
    command = [sys.executable, "-P", "-c", _PROGRAM, str(tmp_path_factory.mktemp("bytecode"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_import_calls_few_functions(added):
    """It takes 56,000 calls in Python 3.11 and 57,000 in 3.12, 0.05 to 0.12 s of a CPU.

    One operation of jax.numpy that is traced in a module adds thousands.
    """
    num_calls, _ = added
    assert 10_000 < num_calls < 65_000


def test_the_import_brings_nothing_but_the_package_and_parts_of_jax(added):
    _, packages = added
    assert packages == ["jax", "jax_fp8gemm"]


# Each module that is imported where it is first used, a name of it, and the packages it needs.
ON_FIRST_USE = [
    ("checkpoint", "load", []),
    ("linen", "Dense", ["flax"]),
    ("maxtext", "Quantization", ["flax"]),
    ("nnx", "Linear", ["flax"]),
    ("qwix", "Provider", ["qwix"]),
    ("tokamax", "ragged_dot", []),
]


@pytest.mark.parametrize("module, name, packages", ON_FIRST_USE)
def test_a_module_is_imported_where_it_is_first_used(module, name, packages):
    for package in packages:
        pytest.importorskip(package)
    program = f"import jax_fp8gemm; print(jax_fp8gemm.{module}.{name}.__name__)"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr


def test_every_public_module_is_an_attribute():
    found = {module.name for module in pkgutil.iter_modules(jax_fp8gemm.__path__)}
    found = {name for name in found if not name.startswith("_")}
    assert found == {"moe", "stats", "checkpoint_policies", *(name for name, *_ in ON_FIRST_USE)}
    assert found < set(dir(jax_fp8gemm))


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="'jax_fp8gemm' has no attribute 'gemm'"):
        jax_fp8gemm.gemm  # noqa: B018
