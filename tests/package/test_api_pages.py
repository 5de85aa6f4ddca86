"""docs/api has every public name."""

import importlib
import re
import types
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = _ROOT / "docs" / "api"
_PACKAGES = ("jax_fp8gemm", "jax_fp8gemm.moe", "jax_fp8gemm.checkpoint")


def _public_modules() -> set[str]:
    """The modules that a user imports: no part of their names begins with an underscore."""
    paths = (path.relative_to(_ROOT) for path in (_ROOT / "jax_fp8gemm").rglob("*.py"))
    names = (".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return {name for name in names if not re.search(r"\._", name)}


def _page(module: str) -> Path:
    return _PAGES / f"{module.removeprefix('jax_fp8gemm.')}.rst"


def test_every_public_module_has_a_page():
    modules = _public_modules()
    assert set(_PACKAGES) <= modules
    pages = {path.name for path in _PAGES.glob("*.rst")} - {"index.rst"}
    assert pages == {_page(module).name for module in modules}
    contents = (_PAGES / "index.rst").read_text()
    assert {f"{name}.rst" for name in re.findall(r"^   ([\w.]+)$", contents, re.M)} == pages


@pytest.mark.parametrize("module", sorted(_public_modules()))
def test_every_public_name_is_on_the_page(module):
    text = _page(module).read_text()
    if f"automodule:: {module}\n" in text and ":no-members:" not in text:
        return  # all that the module defines
    found = vars(importlib.import_module(module))
    names = {name for name in found if not name.startswith("_")}
    if module in _PACKAGES:
        names -= {name for name in names if isinstance(found[name], types.ModuleType)}
    else:
        own = {name for name in names if getattr(found[name], "__module__", "") == module}
        source = Path(found["__file__"]).read_text()
        names = own | set(re.findall(r"import (\w+) as \1\b", source))  # exported again
    listed = re.findall(rf"^\.\. auto\w+:: {re.escape(module)}\.(\w+)", text, re.MULTILINE)
    listed += re.findall(r"^\.\. data:: (\w+)", text, re.MULTILINE)
    assert sorted(listed) == sorted(names - {"annotations"})
