"""The snippets and commands of README.md, CONTRIBUTING.md and docs/*.md."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
_SKIP = re.compile(r"<!-- not run: (.+) -->\n")
_SHELL = {"sh", "bash", "console"}
# How a command in the text begins.
_COMMANDS = ("python ", ".venv/bin/python ", "make ", "bench ", "pip install ")


def _read(pattern: str) -> dict[str, list[Token]]:
    parse = MarkdownIt("commonmark").enable("table").parse
    return {str(p.relative_to(ROOT)): parse(p.read_text()) for p in sorted(ROOT.glob(pattern))}


PAGES = _read("README.md") | _read("CONTRIBUTING.md") | _read("docs/*.md")
PAGES |= _read("docs/migration/*.md")


@dataclass(frozen=True)
class Fence:
    language: str
    text: str
    line: int  # lines of the page above `text`
    skip: str | None  # why it is not run


def fences(page: str) -> list[Fence]:
    """Returns the fenced snippets of a page, in order."""
    found = []
    for before, token in itertools.pairwise([Token("", "", 0), *PAGES[page]]):
        if token.type == "fence":
            is_beside = before.type == "html_block" and before.map[1] == token.map[0]
            skip = _SKIP.fullmatch(before.content) if is_beside else None
            line = token.map[0] + 1
            found.append(Fence(token.info, token.content, line, skip[1] if skip else None))
    return found


def commands(page: str) -> Iterator[str]:
    """Yields the lines of a page's shell snippets, and the commands in its text."""
    for fence in fences(page):
        lines = fence.text.replace("\\\n", " ").splitlines()
        if fence.language == "console":  # with the output
            yield from (line[2:] for line in lines if line.startswith("$ "))
        elif fence.language in _SHELL:
            yield from lines
    spans = (span for token in PAGES[page] for span in token.children or [token])
    for span in spans:
        if span.type in ("code_inline", "code_block"):
            yield from (line for line in span.content.splitlines() if line.startswith(_COMMANDS))
