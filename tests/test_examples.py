"""The examples run, and what they claim to show is there."""

import os
import pathlib
import re
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_quickstart_trains_both_models_alike():
    sizes = ["--steps", "4", "--layers", "1", "--batch", "1"]
    command = [sys.executable, str(EXAMPLES / "quickstart.py"), *sizes, "--dim", "128"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "cuda kernels" in done.stdout  # which backend ran
    rows = re.findall(r"^ +(\d) +(\d+\.\d{4}) +(\d+\.\d{4})$", done.stdout, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [1, 2, 3, 4]
    for _, bf16, fp8 in rows:
        # log(256) = 5.5 at the start; FP8 moves a loss by parts in a thousand, not more.
        assert 3 < float(bf16) < 7 and abs(float(fp8) / float(bf16) - 1) < 0.01
    assert rows[0][1] != rows[3][1]
