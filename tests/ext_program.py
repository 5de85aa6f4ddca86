"""Programs that have the extension alone, without JAX: they start in 0.1 s, and may die."""

import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from jax_fp8gemm._runtime import environment, extension

# A small kernel, for tests of what is around it: 1x128 blocks of a bf16 array.
QUANTIZE_CONFIG = dict(
    mode=0, input=0, e5m2=0, pow2_scale=0, ragged=0, padded=0, paired=0, source=0,
    activation=0, limit=0, alpha=0, up_offset=0,
)  # fmt: skip

_PRELUDE = """\
import importlib.util
spec = importlib.util.spec_from_file_location("_ext", {file!r})
ext = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ext)
ext.configure(source_dir={source_dir!r}, cache_dir={cache_dir!r}, nvrtc_paths={nvrtc_paths!r},
              is_debug=False, dump_dir="")
QUANTIZE_CONFIG = {config!r}
"""


def _has_nvrtc() -> bool:
    try:
        extension.nvrtc()
    except RuntimeError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="needs NVRTC (nvidia-cuda-nvrtc)")


def start(
    code: str, cache_dir: str | Path = "", *, nvrtc_paths: Iterable[str] | None = None, **popen
) -> subprocess.Popen:
    """Runs `code` where `ext` is the extension, configured, and QUANTIZE_CONFIG is defined."""
    from jax_fp8gemm import _ext

    prelude = _PRELUDE.format(
        file=_ext.__file__,
        config=QUANTIZE_CONFIG,
        source_dir=environment.source_dir(),
        cache_dir=str(cache_dir),
        nvrtc_paths=environment.nvrtc_paths() if nvrtc_paths is None else list(nvrtc_paths),
    )
    return subprocess.Popen([sys.executable, "-c", prelude + textwrap.dedent(code)], **popen)


def run(code: str, cache_dir: str | Path = "", **options) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `code`, which may take a minute."""
    process = start(
        code, cache_dir, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    try:
        output, error = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, error
