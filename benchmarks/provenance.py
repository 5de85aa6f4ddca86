"""What a results file was measured with: the commit of the sources, and the versions of the rest.

A checkout's own git says the commit. Where the sources travel without their git, a stamp that
`python -m benchmarks stamp` wrote before says it, if the sources are still those of the stamp.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import subprocess
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
STAMP = ROOT / "benchmarks" / "commit.json"
_SOURCES = ("jax_fp8gemm", "ffi", "benchmarks", "examples")  # examples/train_moe writes metrics
_SUFFIXES = (".py", ".cc", ".h", ".cuh", ".txt")
_PACKAGES = (
    *("jax_fp8gemm", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    *("nvidia-cuda-nvrtc", "nvidia-cublas", "torch", "tokamax"),
)
# Of each library that the process has loaded: the function that says its version.
_LIBRARIES = {
    "cudnn": ("libcudnn.so", "cudnnGetVersion"),
    "cublasLt": ("libcublasLt.so", "cublasLtGetVersion"),
}


def source_commit() -> dict[str, Any]:
    """{"commit", "dirty"}: of a git without changes, else of the stamp, else of git as it is.

    "unknown" and None where neither knows. A copy may come with a git that is older than its files:
    that git sees changes, while the stamp has the hash of these very files.
    """
    of_git = _git_commit()
    if of_git and not of_git["dirty"]:
        return of_git
    return _stamped_commit() or of_git or {"commit": "unknown", "dirty": None}


def write_stamp() -> dict[str, Any]:
    """Writes the stamp for a copy of this checkout without its git. Raises: RuntimeError."""
    found = _git_commit()
    if found is None:
        raise RuntimeError(f"bench: stamp must run in a git checkout; {ROOT} is none")
    stamp = found | {"sources": _hash_of_sources()}
    STAMP.write_text(json.dumps(stamp) + "\n")
    return stamp


def _git_commit() -> dict[str, Any] | None:
    try:
        # Not of a repository that merely contains the folder.
        if pathlib.Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return None
        head = _git("rev-parse", "--short=12", "HEAD")
        # What is run, and not the results that a run writes.
        changed = _git("status", "--porcelain", "--", *_SOURCES, ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": head, "dirty": bool(changed)}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _stamped_commit() -> dict[str, Any] | None:
    if not STAMP.is_file():
        return None
    stamp = json.loads(STAMP.read_text())
    if stamp.get("sources") != _hash_of_sources():
        return None
    return {"commit": stamp["commit"], "dirty": stamp["dirty"]}


def _hash_of_sources() -> str:
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                digest.update(f"{path.relative_to(ROOT)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of packages, of the driver, and of the libraries that the process has loaded."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if deepgemm := _deepgemm_version():
        found["deep_gemm"] = deepgemm
    driver = pathlib.Path("/proc/driver/nvidia/version")
    if driver.exists() and (match := re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text())):
        found["driver"] = match.group()
    return found | loaded_libraries()


def loaded_libraries() -> dict[str, str]:
    """cuDNN and cuBLASLt by the numbers that they give themselves, of those that are loaded."""
    maps = pathlib.Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    found = {}
    for name, (file, function) in _LIBRARIES.items():
        if match := re.search(rf"/\S*/{re.escape(file)}\S*", text):
            version = getattr(ctypes.CDLL(match.group()), function)
            version.restype = ctypes.c_size_t
            found[name] = str(version())
    return found


def _deepgemm_version() -> str | None:
    """Its version, and its commit where a file COMMIT stands beside the package."""
    spec = importlib.util.find_spec("deep_gemm")
    if spec is None or spec.origin is None:
        return None
    package = pathlib.Path(spec.origin).parent
    match = re.search(r"__version__ = '(.*?)'", (package / "__init__.py").read_text())
    commit = package.parent / "COMMIT"
    parts = [match[1] if match else "unknown"]
    return "+".join(parts + ([commit.read_text().strip()] if commit.is_file() else []))
