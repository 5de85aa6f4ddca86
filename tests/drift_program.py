"""Imports the package again and again, each time with one more name of JAX gone, and uses it.

    python tests/drift_program.py NAME ...

For child processes (test_jax_drift.py): prints for each name, as JSON, what it gave: "same" as with
a whole JAX, or an error. JAX has the name back once the package is imported.
"""

import contextlib
import importlib
import json
import sys
from types import ModuleType

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


@contextlib.contextmanager
def without(path: str):
    """With what `path` names, an attribute of a module, gone."""
    module, _, name = path.rpartition(".")
    module = importlib.import_module(module)
    value = getattr(module, name)
    delattr(module, name)
    try:
        yield
    finally:
        setattr(module, name, value)


def import_anew() -> ModuleType:
    for name in [name for name in sys.modules if name.split(".")[0] == "jax_fp8gemm"]:
        del sys.modules[name]
    return importlib.import_module("jax_fp8gemm")


def results(fp8: ModuleType) -> dict:
    """Of an eager call, of gradients under jit, and of a product over two devices."""
    lhs = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    mesh = jax.make_mesh((2,), ("x",))
    shards = jax.device_put(lhs, NamedSharding(mesh, PartitionSpec("x")))
    loss = lambda lhs: (fp8.matmul(lhs, lhs) ** 2).sum()
    runs = {
        "eager": lambda: fp8.matmul(lhs, lhs),
        "grad": lambda: jax.jit(jax.grad(loss))(lhs),
        "mesh": lambda: jax.jit(fp8.matmul)(shards, lhs),
    }
    found = {}
    for name, run in runs.items():
        try:
            found[name] = np.asarray(run())
        except NotImplementedError as error:
            found[name] = str(error)
    return found


def main(paths: list[str]) -> None:
    expected = results(import_anew())
    for path in paths:
        with without(path):
            fp8 = import_anew()
        same = lambda x, y: x if isinstance(x, str) else "same" if np.array_equal(x, y) else "other"
        print(json.dumps({k: same(x, expected[k]) for k, x in results(fp8).items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
