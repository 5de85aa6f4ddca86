"""The Python that pages show runs.

A snippet that cannot run here has the line `<!-- not run: REASON -->` before it.
"""

import jax
import jax.numpy as jnp
import pytest
from pages import PAGES, ROOT, fences

from jax_fp8gemm import checkpoint, quantize

_WITH_PYTHON = [p for p in PAGES if any(fence.language == "python" for fence in fences(p))]


def _write_checkpoint(folder):
    """A published checkpoint, as a reader has it."""
    weight = quantize(jnp.ones((256, 128)), block=(128, 128))
    tensors = {"model.layers.0.mlp.gate_proj.weight": weight}
    checkpoint.save(folder, checkpoint.Checkpoint(tensors))


@pytest.mark.parametrize("page", _WITH_PYTHON)
@pytest.mark.filterwarnings("ignore:.*iter_modules:DeprecationWarning")  # of Flax, to qwix
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """From top to bottom, in one namespace."""
    monkeypatch.chdir(tmp_path)
    _write_checkpoint(tmp_path / "DeepSeek-V3")
    names = {"__name__": page}
    # The settings of a new process; those of the other tests are stricter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for fence in fences(page):
            if fence.language == "python" and fence.skip is None:
                # Lines count as in the page, for tracebacks.
                text = "\n" * fence.line + fence.text
                exec(compile(text, ROOT / page, "exec"), names)


def test_few_snippets_are_not_run_and_each_says_why():
    skips = [(page, fence.skip) for page in PAGES for fence in fences(page) if fence.skip]
    assert len(skips) <= 5, skips
    assert all(len(reason.split()) >= 3 for _, reason in skips), skips
    blocks = [t for page in PAGES for t in PAGES[page] if t.type == "html_block"]
    comments = [block.content for block in blocks if "not run" in block.content]
    assert len(comments) == len(skips), f"without a reason, or not right before one: {comments}"


@pytest.mark.parametrize("page", [p for p in PAGES if fences(p)])
def test_every_snippet_names_its_language(page):
    unnamed = [fence.line for fence in fences(page) if not fence.language]
    assert not unnamed, f"{page}: lines {unnamed} need ```python, ```sh or, for drawings, ```text"
