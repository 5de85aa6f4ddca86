"""pytest plugin: chooses the cases of one suite, puts ours in place, writes down what came out.

pytest -p plugin --suite jax-dot --results results.json FILES
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import exact
import pytest
import substitute
from suites import SUITES, Suite

_SOURCES: dict[str, dict[str, str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", choices=list(SUITES), required=True)
    parser.addoption("--results", type=Path, required=True)
    parser.addoption("--without-ours", action="store_true", help="what fails anyway")


def pytest_configure(config: pytest.Config) -> None:
    suite: Suite = SUITES[config.getoption("suite")]
    config.stash[_CASES] = {}
    substitute.takes_integers = exact.takes_integers = suite.takes_integers
    exact.largest = suite.largest
    if suite.is_exact:
        exact.make_generators_exact()
    exact.draw_float_dtypes()
    if config.getoption("without_ours"):
        return
    substitute.substitute_operator()
    for name in suite.modules:
        substitute.substitute(importlib.import_module(name))


_CASES = pytest.StashKey[dict[str, Any]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite: Suite = SUITES[config.getoption("suite")]
    items[:] = [item for item in items if _is_chosen(suite, item)]
    makers = exact.array_makers if suite.is_exact else lambda module: {}
    for module in {item.module for item in items}:
        substitute.substitute(module, makers, not config.getoption("without_ours"))


def _is_chosen(suite: Suite, item: Any) -> bool:
    if not re.search(suite.tests, item.name):
        return False
    if not suite.contains:
        return True
    sources = _sources_of(item.module.__file__)
    # absl adds a case's name or number to the function's.
    names = [name for name in sources if item.name.startswith(name)]
    return bool(names) and bool(re.search(suite.contains, sources[max(names, key=len)]))


def _sources_of(path: str) -> dict[str, str]:
    """The source text of each test method of a file. By text: inspect parses the file each time."""
    if path not in _SOURCES:
        _, *parts = re.split(r"^  def (test\w*)\(", Path(path).read_text(), flags=re.MULTILINE)
        _SOURCES[path] = dict(zip(parts[::2], parts[1::2], strict=True))
    return _SOURCES[path]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call" or report.outcome != "passed":
        error = call.excinfo
        item.config.stash[_CASES][item.nodeid.partition("::")[2]] = {
            "outcome": report.outcome,
            "calls": substitute.calls,
            "seconds": round(call.duration, 1),
            "error": "" if error is None else f"{error.typename}: {error.value}"[:4000],
        }
    if report.when == "setup":
        substitute.calls = 0
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    cases = session.config.stash[_CASES]
    session.config.getoption("results").write_text(json.dumps(cases, indent=1))
