"""Command line: python -m jax_fp8gemm --version | info | precompile | bench ..."""

import argparse
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial

import jax
import jaxlib.version

from jax_fp8gemm import __version__
from jax_fp8gemm._runtime import environment, extension
from jax_fp8gemm._runtime import precompile as _jit
from jax_fp8gemm._runtime.backend_info import backend_info, ffi_api
from jax_fp8gemm._runtime.precompile import CompileReport
from jax_fp8gemm._tuning import all_kernels, copy_rows_config, quantize_config, sum_rows_config


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # bench has a parser of its own, and modules that the other commands need not import.
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m jax_fp8gemm", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what this machine has, and why the CUDA kernels are off")
    commands.add_parser("bench", help="measure the kernels (see bench --help)")
    precompile = commands.add_parser(
        "precompile", help="compile every kernel into the disk cache; needs NVRTC, but no GPU"
    )
    precompile.add_argument(
        "--all-formats", action="store_true", help="the e5m2 and power-of-two kernels too"
    )
    precompile.add_argument(
        "--clusters", action="store_true", help="those that only tests and bench --tile run, too"
    )
    precompile.add_argument(
        "-j", "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N"
    )
    options = parser.parse_args(arguments)
    if options.command == "info":
        print(backend_info())
        return 0
    if options.jobs < 1:
        precompile.error(f"--jobs must be at least 1; got {options.jobs}")
    return _precompile(options.all_formats, options.clusters, options.jobs)


def _versions() -> str:
    """Returns one line for each part that decides whether the package works."""
    parts = {
        "jax_fp8gemm": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "ffi_api": ffi_api(),
    }
    return "\n".join(f"{name:<13} {version}" for name, version in parts.items())


def _bench(arguments: Sequence[str]) -> int:
    """Runs the checkout's benchmarks/, which is no part of the wheel."""
    checkout = pathlib.Path(__file__).resolve().parents[1]
    if not (checkout / "benchmarks" / "__init__.py").is_file():
        print(
            "bench is in the folder benchmarks/ of a checkout of jax_fp8gemm: install the package "
            "from one with pip install -e '.[bench]'"
        )
        return 1
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    import benchmarks

    return benchmarks.main(arguments)


def _precompile(all_formats: bool, with_clusters: bool, jobs: int) -> int:
    """Compiles everything and prints one line a kernel. Returns 1 if a kernel failed, or has no
    folder to go to or no compiler."""
    folder = extension.cache_dir
    fault = extension.cache_fault(make=True) if folder else "empty"
    if not fault and not environment.is_writable(folder):
        fault = "not writable"
    name = environment.printable(folder)
    if fault:
        print(f"JAX_FP8GEMM_CACHE_DIR must be a writable folder; got '{name}': {fault}")
        return 1
    try:
        extension.nvrtc()
    except RuntimeError as error:  # which each kernel would repeat
        print(f"precompile needs NVRTC: {error}")
        return 1
    tasks = _compilations(all_formats, with_clusters)
    num_failed = num_cached = 0
    # Processes: NVRTC compiles one program at a time in each. They meet in the disk cache.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(task) for task in tasks]
        for i, future in enumerate(as_completed(futures), start=1):
            try:
                report = future.result()
            except RuntimeError as error:
                num_failed += 1
                print(f"[{i}/{len(tasks)}] failed: {error}")
                continue
            num_cached += report.cached
            print(f"[{i}/{len(tasks)}] {_line(report)}", flush=True)
    print(f"{len(tasks) - num_failed} kernels in {name}: {num_cached} were there already")
    return 1 if num_failed else 0


def _compilations(all_formats: bool, with_clusters: bool) -> list[Callable[[], CompileReport]]:
    """Returns the calls that compile everything, one for each kernel."""
    which = dict(all_formats=all_formats, with_clusters=with_clusters)
    gemm = all_kernels.gemm_kernels(extension.num_sms(), **which)
    calls: list[Callable[[], CompileReport]]
    calls = [partial(_jit.compile_gemm, config) for config in gemm]
    for e5m2, pow2_scale in all_kernels.formats(all_formats):
        configs = quantize_config.kernel_configs(e5m2=e5m2, pow2_scale=pow2_scale)
        calls += [partial(_jit.compile_quantize, config) for config in configs]
    copies, sums = copy_rows_config.kernel_configs(), sum_rows_config.kernel_configs()
    calls += [partial(_jit.compile_copy_rows, config) for config in copies]
    calls += [partial(_jit.compile_sum_rows, config) for config in sums]
    return calls


def _line(report: CompileReport) -> str:
    origin = "cached" if report.cached else f"{report.seconds:.2f} s"
    notes = [f"{report.spill_bytes} BYTES SPILLED"] if report.spill_bytes else []
    return "; ".join(
        [f"{report.name}: {origin}, {report.registers} registers", *notes, *report.warnings]
    )


if __name__ == "__main__":
    sys.exit(main())
