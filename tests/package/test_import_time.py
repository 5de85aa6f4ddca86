"""What the import of the package adds to that of JAX."""

import json
import subprocess
import sys

import pytest

# The package is imported again and again, with its bytecode in a file from the second time on.
_PROGRAM = """
import importlib, json, sys, time
import jax

before = set(sys.modules)
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
seconds = []
for _ in range(4):
    for name in [name for name in sys.modules if name.partition(".")[0] == "jax_fp8gemm"]:
        del sys.modules[name]
    start = time.process_time()
    importlib.import_module("jax_fp8gemm")
    seconds.append(time.process_time() - start)
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([min(seconds), sorted(added)]))
"""


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """CPU seconds of the import, and the packages that it brought."""
    command = [sys.executable, "-P", "-c", _PROGRAM, str(tmp_path_factory.mktemp("bytecode"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_import_takes_a_tenth_of_a_second_at_most(added):
    seconds, _ = added
    assert seconds < 0.1


def test_the_import_brings_nothing_but_the_package_and_parts_of_jax(added):
    _, packages = added
    assert packages == ["jax", "jax_fp8gemm"]
