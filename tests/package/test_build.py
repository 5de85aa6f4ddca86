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


def _c_targets() -> dict[str, dict]:
    """The targets of BUILD that the extension is linked from, itself among them, by name."""
    targets, found = _bazel_targets(), {}
    names = ["jax_fp8gemm/_ext"]
    while names:
        name = names.pop()
        found[name] = targets[name]
        names += [dep[1:] for dep in targets[name].get("deps", []) if dep.startswith(":")]
    return found


def _files(target: dict, *kinds: str) -> set[str]:
    """Its files below ffi/."""
    files = [file for kind in kinds for file in target.get(kind, [])]
    return {str(Path(file).relative_to("ffi")) for file in files}


def test_cmake_and_bazel_build_every_source():
    ffi = _ROOT / "ffi"
    in_ffi = lambda pattern: {str(path.relative_to(ffi)) for path in ffi.rglob(pattern)}
    in_bazel = lambda kind: set().union(*(_files(x, kind) for x in _c_targets().values()))
    sources = in_ffi("*.cc")
    cmake = (ffi / "CMakeLists.txt").read_text()
    module = re.findall(r"nanobind_add_module\((.*?)\)", cmake, re.DOTALL)[0]
    assert in_bazel("srcs") == sources
    assert set(re.findall(r"[\w/]+\.cc", module)) == sources
    assert in_bazel("hdrs") == in_ffi("*.h")


def test_cmake_and_bazel_compile_a_source_with_the_same_options():
    """Bazel gives options to a target, so a source with options of its own is a target."""
    found = re.findall(
        r"set_source_files_properties\((\S+) PROPERTIES COMPILE_OPTIONS (\S+)\)",
        (_ROOT / "ffi" / "CMakeLists.txt").read_text(),
    )
    options = {(source, option) for source, of in found for option in of.strip('"').split(";")}
    of_bazel = {
        (source, copt)
        for target in _c_targets().values()
        for source in _files(target, "srcs")
        for copt in target.get("copts", [])
    }
    quantiser = "cpu/quantize_blocks.cc"
    assert of_bazel == options
    assert options == {
        ("thread_end.cc", "-fno-exceptions"),
        (quantiser, "-O3"),
        (quantiser, "-ffp-contract=off"),
    }


def test_a_target_of_bazel_depends_on_what_it_includes():
    """CMake has all headers on one path. Bazel shows a target those of its dependencies."""
    targets = _c_targets()
    for name, target in targets.items():
        deps = target.get("deps", [])
        seen = [target, *(targets[dep[1:]] for dep in deps if dep.startswith(":"))]
        headers = set().union(*(_files(x, "hdrs") for x in seen))
        for file in _files(target, "srcs", "hdrs"):
            text = (_ROOT / "ffi" / file).read_text()
            for included in re.findall(r'#include "(.*?)"', text):
                if included.startswith("xla/ffi/api/"):
                    assert "@xla//xla/ffi/api:ffi" in deps, (name, file)
                else:
                    assert included in headers, (name, file, included)
            # nanobind_extension brings Python's headers, for module.cc and its python.h.
            if re.search(r"#include <(nanobind/|Python\.h)", text):
                assert file in ("module.cc", "python.h"), (name, file)


def test_cmake_and_bazel_link_the_same_libraries():
    cmake = (_ROOT / "ffi" / "CMakeLists.txt").read_text()
    (libraries,) = re.findall(r"target_link_libraries\(_ext PRIVATE (.*)\)", cmake)
    options = {"Threads::Threads": "-lpthread", "${CMAKE_DL_LIBS}": "-ldl"}
    linked = [option for x in _c_targets().values() for option in x.get("linkopts", [])]
    assert sorted(linked) == sorted(options[library] for library in libraries.split())


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
