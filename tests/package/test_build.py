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
    ffi = _ROOT / "ffi"
    in_ffi = lambda pattern: {str(path.relative_to(ffi)) for path in ffi.rglob(pattern)}
    of_bazel = lambda files: {str(Path(file).relative_to("ffi")) for file in files}
    sources = in_ffi("*.cc")
    bazel = of_bazel(targets["jax_fp8gemm/_ext"]["srcs"] + targets["ffi"]["srcs"])
    cmake = (_ROOT / "ffi" / "CMakeLists.txt").read_text()
    module = re.findall(r"nanobind_add_module\((.*?)\)", cmake, re.DOTALL)[0]
    assert bazel == sources
    assert set(re.findall(r"[\w/]+\.cc", module)) == sources
    assert of_bazel(targets["ffi"]["hdrs"]) == in_ffi("*.h")


def test_kernel_sources_include_nothing_but_each_other():
    cuda = _ROOT / "ffi" / "cuda"
    names = {str(path.relative_to(cuda)) for path in cuda.rglob("*.cuh")}
    assert {"groups.cuh", "gemm/gemm.cuh", "quantize/quantize.cuh", "ptx/ptx.cuh"} <= names
    for name in names:
        included = re.findall(r'#\s*include\s*[<"](.*?)[>"]', (cuda / name).read_text())
        assert set(included) <= names, name


def test_bazel_and_cmake_package_every_kernel_source():
    cuda = _ROOT / "ffi" / "cuda"
    sources = {str(path.relative_to(_ROOT)) for path in cuda.rglob("*.cuh")}
    assert set(_bazel_targets()["kernel_sources"]["srcs"]) == sources
    # A DIRECTORY is installed with its sub-folders.
    rule = 'install(DIRECTORY cuda/ DESTINATION jax_fp8gemm/cuda FILES_MATCHING PATTERN "*.cuh")'
    assert rule in (_ROOT / "ffi" / "CMakeLists.txt").read_text()


@pytest.mark.parametrize("variable, suffixes", [("CPP", (".cc", ".h")), ("CUDA", (".cuh",))])
def test_make_checks_the_format_of_every_source(variable, suffixes):
    makefile = (_ROOT / "Makefile").read_text()
    (patterns,) = re.findall(rf"^{variable}_SOURCES = \$\(wildcard (.*)\)$", makefile, re.MULTILINE)
    matched = {path for pattern in patterns.split() for path in _ROOT.glob(pattern)}
    ffi = {path for path in (_ROOT / "ffi").rglob("*") if path.suffix in suffixes}
    assert matched == ffi
