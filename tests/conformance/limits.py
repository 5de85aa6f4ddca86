"""What came out of a suite, held against the list of limits."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("design", "test", "open")


@dataclass(frozen=True)
class Limit:
    """Cases that fail, and why.

    Attributes:
      suites: names of the suites, or patterns of them.
      reason: a sentence.
      kind: "design", what FP8 products are not; "test", a test of JAX's own text or types; "open",
        ours to mend.
      error: regular expression that each error must match.
      cases: names or patterns; each case that matches must fail. None: any case with this error.
    """

    suites: tuple[str, ...]
    reason: str
    kind: str
    error: str
    cases: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"limits.toml: kind must be one of {KINDS}; got {self.kind!r}"

    def is_of(self, suite: str) -> bool:
        return any(fnmatch.fnmatchcase(suite, pattern) for pattern in self.suites)

    def names(self, case: str) -> bool:
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in self.cases or ())

    def explains(self, case: str, error: str) -> bool:
        return (self.cases is None or self.names(case)) and bool(re.search(self.error, error))


@dataclass
class Verdict:
    """Of one suite: cases by outcome, and what is wrong with the list or with ours."""

    passed: list[str] = field(default_factory=list)
    limited: dict[Limit, list[str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    # Passed without a call of ours.
    untouched: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        return len(self.passed) + sum(map(len, self.limited.values()))


def read_limits(path: Path) -> list[Limit]:
    tables = tomllib.loads(path.read_text())["limit"]
    as_tuples = lambda x: tuple(x) if isinstance(x, list) else x
    return [Limit(**{name: as_tuples(x) for name, x in table.items()}) for table in tables]


def judge(suite: str, results: dict[str, Any], limits: Iterable[Limit]) -> Verdict:
    """Sorts the cases of a suite; a fault is a case or a limit that should not be as it is."""
    verdict = Verdict(faults=[] if results else ["no cases: see the log in build/conformance"])
    limits = [limit for limit in limits if limit.is_of(suite)]
    for case, result in results.items():
        if result["outcome"] == "skipped":
            verdict.skipped.append(case)
        elif result["outcome"] == "failed":
            _judge_failure(verdict, case, " ".join(result["error"].split()), limits)
        elif any(limit.names(case) for limit in limits):
            verdict.faults.append(f"{case}: listed in limits.toml, and passes")
        else:
            (verdict.passed if result["calls"] else verdict.untouched).append(case)
    return verdict


def _judge_failure(verdict: Verdict, case: str, error: str, limits: list[Limit]) -> None:
    limit = next((limit for limit in limits if limit.explains(case, error)), None)
    if limit is None:
        verdict.faults.append(f"{case}: fails and is not listed: {error[:300]}")
    else:
        verdict.limited.setdefault(limit, []).append(case)


def unused(
    limits: Iterable[Limit], verdicts: dict[str, Verdict], suites: Iterable[str]
) -> list[str]:
    """Limits that no case falls under, of those whose suites have all run."""
    used = {limit for verdict in verdicts.values() for limit in verdict.limited}
    missing = [suite for suite in suites if suite not in verdicts]
    return [
        f"limits.toml: no case falls under {limit.reason!r}"
        for limit in limits
        if limit not in used and not any(limit.is_of(suite) for suite in missing)
    ]
