"""The notebooks are stored without outputs, and run: their cells assert what the text says."""

from pathlib import Path

import pytest

# A machine that runs `pytest -m gpu` alone need not have them. The extra `test` does.
nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient

_FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
_NOTEBOOKS = sorted(_FOLDER.glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", _NOTEBOOKS, ids=[path.stem for path in _NOTEBOOKS])


@each_notebook
def test_a_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    # Nothing that another editor or another run would change.
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    for cell in notebook.cells:
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
    assert path.read_text() == nbformat.writes(notebook) + "\n"


@each_notebook
def test_a_notebook_runs_and_asserts_something(path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert code.count("\nassert ") + code.count("np.testing.assert_") >= 5
    folder = {"metadata": {"path": str(_FOLDER)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=folder).execute()
