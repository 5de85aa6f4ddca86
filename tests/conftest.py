"""Settings of all tests: strict JAX, eight host devices, quick compilations on the CPU, the `gpu`
marker, checked annotations."""

import atexit
import gc
import os
import pathlib
import pkgutil
import shutil
import sys
import tempfile

import xla_options

# Before jax starts a backend, and before jax_fp8gemm reads its environment. A cache of their own
# keeps tests from passing on kernels that another source tree compiled.
_flags = ["--xla_force_host_platform_device_count=8"]
if not shutil.which("nvidia-smi"):
    # XLA:GPU would read the first flag too.
    _flags += xla_options.QUICK_FLAGS
# The caller's flags come last, and win.
os.environ["XLA_FLAGS"] = " ".join([*_flags, os.environ.get("XLA_FLAGS", "")])
if "JAX_FP8GEMM_CACHE_DIR" not in os.environ:
    os.environ["JAX_FP8GEMM_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax_fp8gemm_cache_")
    atexit.register(shutil.rmtree, os.environ["JAX_FP8GEMM_CACHE_DIR"], ignore_errors=True)
# XLA:CPU has as many threads as this, or as devices. A collective that waits for the other devices
# holds one, and a device may wait in two at once: with 8 threads, 8 devices have hung.
os.environ.setdefault("NPROC", "32")
# Some GPU tests start processes that need the GPU's memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# NumPy's products are small: its idle threads would spin on the cores of other processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import importlib.util

import jax
import pytest

# For `benchmarks`. At the end: an installed jax_fp8gemm comes before the checkout's.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# No lines of Python in the programs: what writes them down is a part of each compilation.
jax.config.update("jax_traceback_in_locations_limit", 0)
# Tracing makes much garbage, little of it in cycles.
gc.set_threshold(20_000, 50, 50)

# Shape annotations are checked in tests and free in use.
if importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype"):
    from jaxtyping import install_import_hook

    # Modules of linen are dataclasses with fields of Flax, whose types beartype cannot check.
    package = importlib.util.find_spec("jax_fp8gemm").submodule_search_locations
    checked = {module.name for module in pkgutil.iter_modules(package)} - {"linen"}
    install_import_hook([f"jax_fp8gemm.{name}" for name in checked], "beartype.beartype")
    install_import_hook("benchmarks", "beartype.beartype")


def _gpu_fault() -> str | None:
    """Why tests marked `gpu` cannot run here. On a Hopper GPU they run, whatever else is wrong: a
    kernel that is off there is a failure, not a reason to skip."""
    if jax.default_backend() != "gpu":
        return f"needs a Hopper GPU; JAX runs on {jax.default_backend()}"
    device = jax.devices()[0]
    if device.compute_capability != "9.0":
        return f"needs a Hopper GPU; got {device.device_kind}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run at most so many cases of each parametrised test, spread over all of them"
    parser.addoption("--most-of-each", type=int, default=None, metavar="N", help=text)


def _spread(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """The first case, the last one, and others at equal distances between them."""
    if len(cases) <= most:
        return cases
    last = len(cases) - 1
    return [cases[round(i * last / (most - 1))] for i in range(most)]


def _leave_out(config: pytest.Config, items: list[pytest.Item], most: int) -> None:
    if most < 2:
        raise pytest.UsageError(f"--most-of-each must be 2 or more; got {most}")
    of_each: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_each.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for cases in of_each.values() for item in _spread(cases, most)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (most := config.getoption("--most-of-each")) is not None:
        _leave_out(config, items, most)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    fault = _gpu_fault() if marked else None
    for item in marked:
        if fault is not None:
            item.add_marker(pytest.mark.skip(reason=fault))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a failure at once: a run on a GPU may be cut off before pytest sums up."""
    if report.failed:
        print(f"\nfailed: {report.nodeid} ({report.when})", flush=True)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay


@pytest.fixture
def traced_anew():
    """For tests that change what the layer on a mesh is made of: what they trace does not stay."""
    from jax_fp8gemm.moe._parallel.layer import expert_parallel_on_mesh

    expert_parallel_on_mesh.clear_cache()
    yield
    expert_parallel_on_mesh.clear_cache()


@pytest.fixture(scope="module", autouse=True)
def _few_mappings():
    """Frees compiled programs before Linux refuses a process more than 65,530 mappings of memory.

    XLA maps each program that it compiles for a CPU, and ends in a segmentation fault where it
    cannot.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()
