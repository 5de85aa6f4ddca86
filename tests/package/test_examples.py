"""The examples run, and what they claim to show is there."""

import os
import pathlib
import re
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def losses(script, *args):
    """(step, bf16 loss, fp8 loss) of each line of the table that an example prints."""
    command = [sys.executable, str(EXAMPLES / script), *args]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "cuda kernels" in done.stdout  # which backend ran
    rows = re.findall(r"^ +(\d+) +(\d+\.\d{4}) +(\d+\.\d{4})$", done.stdout, re.MULTILINE)
    return [(int(step), float(bf16), float(fp8)) for step, bf16, fp8 in rows]


def test_quickstart_trains_both_models_alike():
    sizes = ["--layers", "1", "--batch", "1", "--dim", "128"]
    rows = losses("quickstart.py", "--steps", "4", *sizes)
    assert [step for step, *_ in rows] == [1, 2, 3, 4]
    # log(256) = 5.5 at the start. How exact FP8 is shows in test_gradient_accuracy, not in losses.
    assert all(3 < loss < 7 for _, *both in rows for loss in both)
    assert rows[0][1] != rows[3][1]
    assert any(bf16 != fp8 for _, bf16, fp8 in rows)


def test_moe_layer_trains_both_layers_alike():
    rows = losses("moe_layer.py", "--steps", "20", "--tokens", "128")
    assert [step for step, *_ in rows] == list(range(2, 21, 2))
    for column in (1, 2):
        assert rows[-1][column] < 0.9 * rows[0][column]
    assert any(bf16 != fp8 for _, bf16, fp8 in rows)
