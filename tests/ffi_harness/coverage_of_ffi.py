"""Prints the lines of ffi/ that CPU tests execute; see `make coverage`.

Builds the harness and the extension with --coverage, runs the harness and the tests that use the
extension, and adds both up with gcovr.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import builder
import golden
import nanobind

# The tests of the JIT, of its cache and of errors without a GPU.
_TESTS = ("test_ffi", "test_jit", "test_kernel_file", "test_config_checks", "test_backend_info")


def build_extension() -> Path:
    """The extension with --coverage, as builder.py builds the harness."""
    folder = builder.variant_folder("coverage")
    root = Path(nanobind.__file__).parent
    python = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    includes = [root / "include", root / "ext" / "robin_map" / "include", python]
    flags = [
        *builder.compile_flags("coverage"),
        *(f"-isystem{path}" for path in includes),
        "-DNB_DOMAIN=jax_fp8gemm",
        # nanobind's own rule for its extensions.
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
    ]
    sources = [builder.FFI / "module.cc", root / "src" / "nb_combined.cpp"]
    objects = builder.compile_all(sources, folder, flags, has_prefix=False)
    handlers = [
        builder.object_file(path, folder)
        for path in builder.FFI.rglob("*.cc")
        if path != sources[0]
    ]
    target = folder / "_ext.so"
    builder.link(target, ["-shared", *objects.values(), *handlers, "-ldl"], "coverage")
    return target


def run_harness(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        inputs = [*golden.write_inputs(Path(temporary)), f"cache={temporary}/cache"]
        for command in ("random", "configs", "tensor_maps", "faults", "threads", "record"):
            subprocess.run(
                [folder / "harness", command, *inputs, "seed=1", "calls=6000"],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        for nth in (1, 17, 18):  # calls of opening the driver that fail: one of each function
            opening = [folder / "harness", "opening", *inputs, f"calls={nth}"]
            subprocess.run(opening, check=True, stdout=subprocess.DEVNULL)


def run_tests(extension: Path) -> None:
    """Runs tests with the extension in the place of the installed one."""
    environment = os.environ | {"JAX_FP8GEMM_COVERAGE_EXT": str(extension)}
    tests = [builder.ROOT / "tests" / "runtime" / f"{name}.py" for name in _TESTS]
    # Not those that compile hundreds of kernels, nor the one that measures time.
    few = ["-k", "not spill and not ptxas and not read_from_disk"]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "coverage_plugin", *few]
    tests = filter(Path.exists, tests)
    subprocess.run([*command, *tests], env=environment, cwd=builder.ROOT, check=True)


def main() -> None:
    if (fault := builder.missing_tool("coverage")) is not None:
        sys.exit(f"coverage: {fault}")
    folder = builder.build("coverage")
    for counts in folder.glob("*.gcda"):
        counts.unlink()
    extension = build_extension()
    run_harness(folder)
    run_tests(extension)
    filters = ["--filter", "ffi/.*\\.cc$", "--merge-mode-functions", "merge-use-line-min"]
    command = [sys.executable, "-m", "gcovr", "--root", builder.ROOT, *filters, folder]
    subprocess.run(command, check=True, cwd=builder.ROOT)


if __name__ == "__main__":
    main()
