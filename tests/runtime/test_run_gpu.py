"""CUDA graphs, JAX's cache, the memory checker, threads: the same bits however a program runs."""

import functools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import gpu_cases
import jax
import pytest

pytestmark = pytest.mark.gpu

_FLAGS = os.environ.get("XLA_FLAGS", "")


@functools.cache
def _plain_hash() -> str:
    """Hashes of the program's results without CUDA graphs."""
    run = gpu_cases.run_program(XLA_FLAGS=f"{_FLAGS} --xla_gpu_enable_command_buffer=")
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_inside_cuda_graphs(tmp_path):
    """Every thunk in a graph; replayed with the same addresses: the hashes of no graphs."""
    flags = f"{_FLAGS} --xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}"
    run = gpu_cases.run_program("--repeat", "20", XLA_FLAGS=flags)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == _plain_hash()
    assert "kCommandBuffer" in gpu_cases.thunks(tmp_path), "no CUDA graph was made"


def test_default_flags():
    run = gpu_cases.run_program("--repeat", "20")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == _plain_hash()


def test_from_the_compilation_cache(tmp_path):
    """XLA instantiates no call of an executable that it reads from there."""
    cache = dict(JAX_COMPILATION_CACHE_DIR=str(tmp_path), JAX_LOG_COMPILES="1")
    cache |= dict(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    cold, warm = (gpu_cases.run_program(**cache) for _ in range(2))
    for run in (cold, warm):
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == _plain_hash()
    hit = "Persistent compilation cache hit for 'jit__program'"
    assert (hit in cold.stderr, hit in warm.stderr) == (False, True)


def _find_sanitizer() -> str | None:
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places = [f"{folder}/{sub}" for folder in folders for sub in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *places]))


def test_memcheck_finds_nothing():
    """Every buffer an allocation of its own, so that an overrun does not land in a neighbour.

    Our kernels alone are watched: XLA's, too, would take many minutes. XLA compiles in one thread:
    with more it crashed under the checker, or never ended, where the machine was busy.
    """
    sanitizer = _find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    prefix = (sanitizer, "--tool=memcheck", "--error-exitcode=77", "--require-cuda-init=no")
    prefix += ("--kernel-name=kns=fp8_gemm", "--kernel-name=kns=quantize")
    run = gpu_cases.run_program(
        prefix=prefix,
        XLA_PYTHON_CLIENT_ALLOCATOR="platform",
        XLA_FLAGS=f"{_FLAGS} --xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
        " --xla_gpu_force_compilation_parallelism=1",
    )
    report = run.stdout + run.stderr
    if "Device not supported" in report:
        pytest.skip("compute-sanitizer refuses this machine's device (seen under gVisor)")
    assert run.returncode == 0, report[-6000:]
    assert "ERROR SUMMARY: 0 errors" in report
    assert _plain_hash() in run.stdout


def test_threads_dispatch_at_once():
    """Eight threads, each its own operands and its own first compile."""
    shapes = [(64 * i, 264, 640) for i in range(1, 9)]
    cases = [gpu_cases.operands(i, shape) for i, shape in enumerate(shapes)]
    run = lambda case: jax.block_until_ready(jax.jit(lambda *xs: gpu_cases.multiply(*xs))(*case))
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, cases))
    for case, out in zip(cases, together, strict=True):
        gpu_cases.assert_same(run(case), out)
        gpu_cases.assert_model_predicts(out, *case, num_samples=64)
