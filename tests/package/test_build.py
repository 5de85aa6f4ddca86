"""The two build descriptions name the files that exist, and the same ones."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not (_ROOT / "BUILD").exists(), reason="needs the checkout that the tests came from"
)


def _bazel_targets() -> dict[str, dict]:
    """Arguments of each rule of BUILD, by name. Starlark of this kind is Python too."""
    targets = {}
    rule = lambda **arguments: targets.update({arguments["name"]: arguments})
    rules = ("nanobind_extension", "cc_library", "py_library", "filegroup")
    ignored = lambda *args, **kwargs: None
    names = dict.fromkeys(("load", "package", "licenses", "exports_files"), ignored)
    names |= dict.fromkeys(rules, rule)
    names["glob"] = lambda patterns: [
        str(path.relative_to(_ROOT)) for pattern in patterns for path in _ROOT.glob(pattern)
    ]
    exec((_ROOT / "BUILD").read_text(), names)
    return targets


def test_every_file_that_bazel_names_exists():
    targets = _bazel_targets()
    assert {"jax_fp8gemm", "jax_fp8gemm/_ext", "ffi", "kernel_sources"} <= set(targets)
    for name, arguments in targets.items():
        files = [*arguments.get("srcs", []), *arguments.get("hdrs", [])]
        assert files, name
        for file in [*files, *arguments.get("data", []), *arguments.get("deps", [])]:
            if file.startswith(":"):
                assert file[1:] in targets, (name, file)
            elif not file.startswith("@"):
                assert (_ROOT / file).is_file(), (name, file)


def test_cmake_and_bazel_build_every_source():
    targets = _bazel_targets()
    sources = {path.name for path in (_ROOT / "ffi").glob("*.cc")}
    headers = {path.name for path in (_ROOT / "ffi").glob("*.h")}
    bazel = {
        Path(file).name for name in ("jax_fp8gemm/_ext", "ffi") for file in targets[name]["srcs"]
    }
    cmake = (_ROOT / "ffi" / "CMakeLists.txt").read_text()
    module = re.findall(r"nanobind_add_module\((.*?)\)", cmake, re.DOTALL)[0]
    assert bazel == sources
    assert set(re.findall(r"\w+\.cc", module)) == sources
    assert {Path(file).name for file in targets["ffi"]["hdrs"]} == headers


def test_kernel_sources_include_nothing_but_each_other():
    cuda = _ROOT / "ffi" / "cuda"
    names = {path.name for path in cuda.glob("*.cuh")}
    for path in cuda.glob("*.cuh"):
        included = re.findall(r'#\s*include\s*[<"](.*?)[>"]', path.read_text())
        assert set(included) <= names, path.name
