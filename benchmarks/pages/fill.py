"""`python -m benchmarks page`: puts tables of the results files into README and docs.

A document names a table in a comment, and the table stands between that and the next comment:

    <!-- results dense -->
    <!-- end -->
"""

import pathlib
import re
from collections.abc import Callable

from benchmarks.pages.kernels import kernels_table
from benchmarks.pages.layers import energy_table, steps_table
from benchmarks.pages.machines import machines_section
from benchmarks.pages.readme import means_text, readme_table
from benchmarks.pages.results import H100
from benchmarks.pages.tables import files_table, regret_table, rows_table, summary_table
from benchmarks.provenance import ROOT

DOCUMENTS = ("README.md", "docs/performance.md", "docs/performance_h100.md", "docs/moe.md")
_TABLES: dict[str, Callable[[str], str]] = {
    "files": files_table,
    "summary": summary_table,
    "regret": regret_table,
    "readme": readme_table,
    "means": means_text,
    "steps": steps_table,
    "energy": energy_table,
    "kernels": kernels_table,
    "machines": machines_section,
}


def fill(text: str) -> str:
    """`text` with the table of each name between its two comments."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith("image_"):
            content = _image(name.removeprefix("image_"))
        else:
            prefix = H100 if name.startswith(H100) else ""
            of = _TABLES.get(name.removeprefix(prefix))
            content = of(prefix) if of else rows_table(name)
        return f"<!-- results {name} -->\n{content}\n<!-- end -->"

    return re.sub(r"<!-- results (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def _image(name: str) -> str:
    """The picture that `python -m benchmarks plot` made, if there is one."""
    file = ROOT / "docs" / "images" / f"{name}.svg"
    return f"![{name.replace('_', ' ')}](images/{name}.svg)" if file.is_file() else ""


def main() -> int:
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(fill(path.read_text()))
        print(f"filled {pathlib.Path(document)}")
    return 0
