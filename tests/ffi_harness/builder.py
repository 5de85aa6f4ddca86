"""Builds the harness, the fake driver and the fake NVRTC with g++, into build/ffi_harness.

    python tests/ffi_harness/builder.py plain|asan|tsan|coverage   prints the folder of a variant

All of ffi/ but module.cc is compiled into the harness itself, against the FFI headers of the
installed jaxlib. What is up to date is not compiled again. Processes that build the same folder
wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
FFI = ROOT / "ffi"

# -O0: compiling takes longer than running.
VARIANTS = {
    "plain": ["-O1"],
    "asan": ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-O1", "-g1", "-fsanitize=thread"],
    "coverage": ["-O0", "--coverage"],
}
_COMMON = ["-std=c++17", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"]

_FAKES = {
    "libcuda.so.1": ("fake_devices", "fake_driver_state", "fake_launch", "driver_rules"),
    "libnvrtc.so.13": ("fake_nvrtc",),
}
_NOT_HARNESS = (*sum(_FAKES.values(), ()), "host_layout")


def missing_tool(variant: str) -> str | None:
    """Why this variant cannot be built on this machine, or None."""
    if shutil.which("g++") is None:
        return "needs g++"
    flags = [flag for flag in VARIANTS[variant] if flag.startswith(("-fsanitize", "--cov"))]
    command = ["g++", *flags, "-x", "c++", "-", "-o", "program"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, input="int main() {}", capture_output=True, text=True, cwd=folder
        )
    return None if done.returncode == 0 else f"g++ cannot link {' '.join(flags)}: {done.stderr}"


def build(variant: str) -> Path:
    """Builds a variant. Returns its folder, which has `harness` and the fakes."""
    ffi = [path for path in FFI.rglob("*.cc") if path.name != "module.cc"]
    harness = [path for path in FOLDER.glob("*.cc") if path.stem not in _NOT_HARNESS]
    fakes = [FOLDER / f"{name}.cc" for name in sum(_FAKES.values(), ())]
    folder = variant_folder(variant)
    objects = compile_all([*ffi, *harness, *fakes], folder, compile_flags(variant))
    build_fakes(variant)
    # By path, and found by the loader beside the program: no LD_LIBRARY_PATH.
    inputs = [*(objects[path] for path in (*ffi, *harness)), *(folder / name for name in _FAKES)]
    libraries = ["-pthread", "-ldl", "-Wl,-rpath,$ORIGIN"]
    link(folder / "harness", [*inputs, *libraries], variant)
    return folder


def build_fakes(variant: str) -> Path:
    """Builds the fake driver and the fake NVRTC alone. Returns their folder."""
    folder = variant_folder(variant)
    for name, stems in _FAKES.items():
        sources = [FOLDER / f"{stem}.cc" for stem in stems]
        objects = compile_all(sources, folder, compile_flags(variant), has_prefix=False)
        shared = ["-shared", f"-Wl,-soname,{name}", *objects.values(), "-ldl"]
        link(folder / name, shared, variant)
    return folder


def compile_flags(variant: str) -> list[str]:
    return [
        *_COMMON,
        *VARIANTS[variant],
        # As system headers: gcc warns inside them.
        f"-isystem{jax.ffi.include_dir()}",
        f"-I{FFI}",
        f"-I{FOLDER}",
    ]


def variant_folder(variant: str) -> Path:
    """Where a variant is built: one folder for each set of flags and of headers."""
    digest = hashlib.sha256("\0".join(compile_flags(variant)).encode()).hexdigest()[:8]
    folder = ROOT / "build" / "ffi_harness" / f"{variant}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_all(
    sources: list[Path], folder: Path, flags: list[str], *, has_prefix: bool = True
) -> dict[Path, Path]:
    """Compiles the sources in parallel. Returns the object of each.

    has_prefix: they include XLA's headers, which are most of the work of each: compiled once.
    """
    headers = [*FFI.rglob("*.h"), *FOLDER.glob("*.h"), Path(__file__)]
    newest_header = max(path.stat().st_mtime for path in headers)
    objects = {path: object_file(path, folder) for path in sources}
    is_stale = lambda path: (
        not objects[path].exists()
        or objects[path].stat().st_mtime < max(newest_header, path.stat().st_mtime)
    )
    with _alone(folder):
        stale = [path for path in sources if is_stale(path)]
        if stale:
            prefix = _compile_prefix(folder, flags) if has_prefix else []
            compile_one = lambda path: _run(
                ["g++", *flags, *prefix, "-c", path, "-o", objects[path]]
            )
            # The longest first.
            stale.sort(key=lambda path: path.stat().st_size, reverse=True)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(compile_one, stale))
    return objects


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes from building in a folder."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield


def object_file(source: Path, folder: Path) -> Path:
    """Where compile_all puts the object of a source."""
    return folder / f"{source.parent.name}-{source.stem}.o"


def _compile_prefix(folder: Path, flags: list[str]) -> list:
    """Compiles XLA's headers. Returns the flags that include them."""
    prefix = folder / "prefix.h"
    prefix.write_text('#include "xla/ffi/api/ffi.h"\n')
    _run(["g++", *flags, "-x", "c++-header", prefix, "-o", f"{prefix}.gch"])
    return ["-include", prefix]


def link(target: Path, arguments: list, variant: str) -> None:
    inputs = [path for path in arguments if isinstance(path, Path)]
    newest = max(path.stat().st_mtime for path in inputs)
    with _alone(target.parent):
        if not target.exists() or target.stat().st_mtime < newest:
            _run(["g++", *VARIANTS[variant], *arguments, "-o", target])


def _run(command: list) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


if __name__ == "__main__":
    print(build(sys.argv[1]))
