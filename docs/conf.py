"""Sphinx builds the documentation by this file: `make docs`.

The pages are Markdown that a forge shows too. docs/api is for Sphinx alone: it has the docstrings.
"""

import re
from typing import Any

from sphinx.pycode import ModuleAnalyzer

from jax_fp8gemm import DEEPSEEK_V3

project = "jax_fp8gemm"
author = "The jax_fp8gemm authors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
highlight_language = "text"  # of code that names no language
default_role = "code"  # docstrings write `name`
smartquotes_action = "D"  # dashes; what is in quotes may be copied into code

# Links to headings are a forge's: page.md#the-heading-in-lower-case.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False  # the signature of a dataclass has its types

html_theme = "sphinx_book_theme"
html_title = "jax_fp8gemm"
html_copy_source = False
html_show_copyright = False
html_theme_options = {"show_navbar_depth": 1, "use_download_button": False}


def _shorten(text: str | None) -> str | None:
    """Writes Int[Array, ' g'] as Int[Array, 'g'], and the default recipe by its name.

    jaxtyping's space is for linters.
    """
    text = text and text.replace(repr(DEEPSEEK_V3), "DEEPSEEK_V3")
    return text and re.sub(r"\[Array, ' (\w+)'\]", r"[Array, '\1']", text)


def _shorten_signature(*event: Any) -> tuple[str | None, str | None]:
    *_, signature, result = event
    return _shorten(signature), _shorten(result)


def _link_pages(*event: Any) -> None:
    """Makes links of the names of pages, docs/remat.md, in a docstring."""
    lines = event[-1]
    lines[:] = [re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`/\1`", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("autodoc-process-docstring", _link_pages)
    # autodoc shows overloads in place of a signature, and those here name no arguments.
    for module in ("_moe_layer", "_route"):
        analyzer = ModuleAnalyzer.for_module(f"jax_fp8gemm.moe.{module}")
        analyzer.analyze()
        analyzer.overloads.clear()
