"""What the text of a compiled program says: its computations, and what runs beside collectives."""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence

COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
# Of the branches of jax.lax.cond the one for False.
CALLED = re.compile(r"\b(?:calls=|to_apply=|false_computation=|branch_computations=\{)%?([\w.-]+)")
_KINDS = f"{COLLECTIVES}|async"
_START = re.compile(rf"%?([\w.-]+) = .+? ({_KINDS})-start\(")
_DONE = re.compile(rf" (?:{_KINDS})-done\((?:.* )?%?([\w.-]+)\)")
_BLOCKING = re.compile(rf" = .+? ({_KINDS})\(")
_PRODUCT = re.compile(r'custom_call_target="jax_fp8gemm_(?:gemm|grouped_gemm|grouped_wgrad)"')


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation, of the first one under ENTRY."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.-]+)", line)):
            lines = found.setdefault("ENTRY" if head[1] else head[2], [])
        else:
            lines.append(line)
    return found


def products_beside(text: str) -> Mapping[str, Sequence[int]]:
    """How many of our products are queued while each collective runs, by the kind of collective.

    Args:
      text: of the optimised HLO, whose instructions stand in the order in which they are queued.
    Returns:
      {"all-gather": [0, 2], ...}: in the order of the program; 0 where a collective blocks. Loops
      of turns, and branches in which turns are left, are left out: evenly spread choices do not
      enter them.
    """
    found: dict[str, list[int]] = collections.defaultdict(list)
    running: dict[str, tuple[str, int]] = {}
    num_products = 0
    for line in _lines(computations(text), "ENTRY"):
        num_products += bool(_PRODUCT.search(line))
        if started := _START.search(line):
            kind = found[started[2]]
            running[started[1]] = started[2], len(kind)
            kind.append(-num_products)
        elif (done := _DONE.search(line)) and done[1] in running:
            kind, i = running.pop(done[1])
            found[kind][i] += num_products
        elif blocking := _BLOCKING.search(line):
            found[blocking[1]].append(0)
    return dict(sorted(found.items()))


def _lines(of: Mapping[str, Sequence[str]], name: str) -> Iterator[str]:
    """The instructions of a computation; in place of a fusion or a call those that it calls."""
    for line in of.get(name, ()):
        called = [] if _START.search(line) or " while(" in line else CALLED.findall(line)
        yield line
        for inner in called:
            yield from _lines(of, inner)
