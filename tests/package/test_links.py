"""Documents and notebooks name files, headings and tests that exist."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SKIPPED = {"build", "dist", "node_modules"}

pytestmark = pytest.mark.skipif(
    not (_ROOT / "docs").exists(), reason="needs the checkout that the tests came from"
)


def _files() -> Iterator[Path]:
    """Every file of the checkout, but those of virtual environments and builds."""
    for folder, folders, names in os.walk(_ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        yield from (Path(folder, name) for name in names)


_FILES = set(_files())
_DOCUMENTS = sorted(path for path in _FILES if path.suffix in (".md", ".ipynb"))
each_document = pytest.mark.parametrize(
    "document", _DOCUMENTS, ids=[str(path.relative_to(_ROOT)) for path in _DOCUMENTS]
)


def _anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and Sphinx name them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", x.strip()).lower()) for x in headings)
    return {heading.replace(" ", "-") for heading in plain}


@each_document
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"no file: {link}"
        assert not anchor or anchor in _anchors(target), f"no heading: {link}"


@each_document
def test_files_that_are_named_exist(document):
    folders = {parent for path in _FILES for parent in path.parents}
    bases = (_ROOT, _ROOT / "jax_fp8gemm", _ROOT / "docs", document.parent)
    for name in re.findall(r"`([\w./-]+)`", document.read_text()):
        if name.startswith("jax/"):  # a file of JAX
            continue
        if "/" in name and re.search(r"\.(py|cc|h|cuh|md|json|toml)$|\w/$", name):
            found = any((base / name) in _FILES | folders for base in bases)
            assert found, f"no file or folder: {name}"
        elif re.fullmatch(r"test_\w+\.py", name):
            assert any(path.name == name for path in _FILES), f"no test: {name}"
