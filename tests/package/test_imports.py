"""The folders of the package are layers: modules import from their own folder and those below."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jax_fp8gemm

_PACKAGE = Path(jax_fp8gemm.__file__).parent
# From bottom to top. Behind them: the public list, the command line.
_LAYERS = (
    "_runtime",
    "_sharding",
    "_data",
    "_emulation",
    "_tuning",
    "_primitives",
    "_ops",
    "moe",
    "checkpoint",
    "nnx",
    "_inspect",
    "",
)


def _modules() -> dict[str, Path]:
    """Each module's name below the package, "_data.checks", and its file; "" is the package."""
    files = {}
    for path in _PACKAGE.rglob("*.py"):
        parts = path.relative_to(_PACKAGE).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


_MODULES = _modules()


def _imports(name: str) -> Iterator[tuple[str, str]]:
    """The modules of the package that a module imports, anywhere in it, and the names from them."""
    for node in ast.walk(ast.parse(_MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative path, line {node.lineno}"
            if (node.module or "").split(".")[0] != "jax_fp8gemm":
                continue
            source = node.module.partition(".")[2]
            for alias in node.names:
                inner = f"{source}.{alias.name}".lstrip(".")
                yield (inner, "") if inner in _MODULES else (source, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jax_fp8gemm":
                    yield alias.name.partition(".")[2], ""


def _layer(name: str) -> int:
    folder = name.split(".")[0]
    return _LAYERS.index(folder if folder in _LAYERS else "")


def test_every_folder_is_a_layer():
    folders = {name.split(".")[0] for name in _MODULES if "." in name}
    assert folders == set(_LAYERS) - {""}


@pytest.mark.parametrize("name", sorted(_MODULES))
def test_a_module_imports_from_no_layer_above(name):
    for source, _ in _imports(name):
        if source:  # the extension, and who wants the whole package, import from the top
            assert _layer(source) <= _layer(name), f"{name} imports {source} from above"


@pytest.mark.parametrize("name", sorted(_MODULES))
def test_a_folder_is_entered_by_names_without_an_underscore(name):
    folder = name.split(".")[0]
    for source, imported in _imports(name):
        first, *inner = source.split(".")
        if first == folder or not source:
            continue
        private = [part for part in (*inner, imported) if part.startswith("_")]
        if name:  # the public list takes what it likes
            assert not private, f"{name} imports {source}.{imported}"


def test_no_two_modules_import_each_other():
    graph = {name: {source for source, _ in _imports(name) if source} for name in _MODULES}
    # A folder's __init__ that lists names is imported by nobody below it.
    tuple(graphlib.TopologicalSorter(graph).static_order())
