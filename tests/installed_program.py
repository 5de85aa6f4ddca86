"""Checks an installed package, where the checkout and the tests' packages are not on the path.

    python -P tests/installed_program.py

For `make check-wheels`: the extension is loaded, a product has NumPy's bits, and NVRTC compiles the
kernel sources of the package. It ends with an exit status of 1, and an error, at what is wrong.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

os.environ["JAX_FP8GEMM_CACHE_DIR"] = ""  # nothing is compiled already, and nothing is left
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8gemm
from jax_fp8gemm._runtime import environment, extension, precompile
from jax_fp8gemm._tuning import all_kernels


def check_files() -> None:
    package = Path(jax_fp8gemm.__file__).parent
    assert package.parent == Path(sysconfig.get_path("platlib")), package
    assert environment.source_dir() == str(package / "cuda")
    assert (package / "py.typed").is_file() and (package / "_ext.pyi").is_file()


def check_product() -> None:
    """The largest value of each block is 7. So all scales are 1/64, and nothing is rounded."""
    rng = np.random.default_rng(0)
    lhs, rhs = rng.integers(-7, 8, (64, 256)), rng.integers(-7, 8, (256, 128))
    lhs[:, ::128] = rhs[::128] = 7
    product = lambda x, y: (jax_fp8gemm.matmul(x, y) ** 2).sum()
    operands = [jnp.asarray(x, jnp.float32) for x in (lhs, rhs)]
    np.testing.assert_array_equal(jax.jit(jax_fp8gemm.matmul)(*operands), lhs @ rhs)
    for gradient, operand in zip(jax.grad(product, (0, 1))(*operands), operands, strict=True):
        assert gradient.shape == operand.shape and bool(jnp.isfinite(gradient).all())


def check_kernels() -> None:
    path, *version = extension.nvrtc()
    report = precompile.compile_gemm(next(all_kernels.gemm_kernels(extension.num_sms())))
    assert not report.cached and not report.spill_bytes and not report.warnings, report
    print(f"{report.name}: NVRTC {version[0]}.{version[1]}, {report.registers} registers")
    assert path.startswith(sys.prefix), path


def check_command_line() -> None:
    run = lambda *arguments, **variables: subprocess.run(
        [sys.executable, "-P", "-m", "jax_fp8gemm", *arguments],
        capture_output=True, text=True, env=os.environ | variables,
    )  # fmt: skip
    versions = run("--version")
    assert versions.returncode == 0, versions.stderr
    print(versions.stdout, end="")
    with tempfile.TemporaryDirectory() as folder:
        done = run("precompile", JAX_FP8GEMM_CACHE_DIR=folder, JAX_FP8GEMM_NVRTC="/none")
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert done.stdout.startswith("precompile needs NVRTC: "), done.stdout
    bench = run("bench", "--help")
    assert bench.returncode == 1 and not bench.stderr, bench.stderr
    assert bench.stdout.startswith("bench is in the folder benchmarks/ of a checkout")


if __name__ == "__main__":
    print(f"python {sys.version.split()[0]}")
    check_files()
    check_command_line()
    check_product()
    check_kernels()
