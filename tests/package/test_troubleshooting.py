"""Each message that docs/troubleshooting.md explains is one that the sources still have."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "troubleshooting.md"


def _python_texts(path: Path) -> Iterator[str]:
    """The texts of a Python file: of an f-string, the parts between what it inserts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _cpp_texts(path: Path) -> Iterator[str]:
    """The texts of a C++ file. Neighbours are one, as for the compiler."""
    literal = r'"((?:[^"\\\n]|\\.)*)"'
    for match in re.finditer(rf"{literal}(?:\s*{literal})*", path.read_text()):
        yield "".join(re.findall(literal, match[0]))


def _texts_of_files() -> list[set[str]]:
    python = [set(_python_texts(path)) for path in (_ROOT / "jax_fp8gemm").rglob("*.py")]
    cpp = [path for end in ("cc", "h") for path in (_ROOT / "ffi").rglob(f"*.{end}")]
    return [*python, *(set(_cpp_texts(path)) for path in cpp)]


def _parts(message: str) -> list[str]:
    """What a message says beside the name of the op and what was given."""
    message = re.sub(r"^(<op>|[\w.]+): ", "", message)
    parts = (re.sub(r"[;,]? got:?$", "", part.strip()) for part in message.split("..."))
    return [part for part in parts if re.search(r"\w{2}", part)]


_MESSAGES = re.findall(r"^### `(.*)`$", _PAGE.read_text(), re.MULTILINE) if _PAGE.exists() else []
_TEXTS = _texts_of_files()


def _is_said(parts: list[str]) -> bool:
    """Whether one file has all parts."""
    return any(all(any(part in text for text in texts) for part in parts) for texts in _TEXTS)


def test_the_page_has_messages():
    assert len(_MESSAGES) > 30
    assert not _is_said(["operands must be two arrays", "a part that no source has"])


@pytest.mark.parametrize("message", _MESSAGES)
def test_message_exists(message):
    parts = _parts(message)
    assert parts and max(map(len, parts)) > 8, message
    assert _is_said(parts), parts
