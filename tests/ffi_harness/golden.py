"""Records the named launches; writes golden_launches.json.

make golden-launches   after a change of launch code that is meant to change them
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import builder
import golden_cases
import package_configs

FILE = builder.FOLDER / "golden_launches.json"


def write_inputs(folder: Path) -> list[str]:
    """Writes what the harness reads. Returns its arguments."""
    sources, configs, cases = folder / "sources", folder / "configs.txt", folder / "cases.txt"
    operations = ("gemm", "quantize", "copy_rows", "sum_rows")
    split = "gemm/split_k.cuh", "gemm/partial_sums.cuh"
    for name in (*(f"{op}/{op}.cuh" for op in operations), *split):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text("// The fake NVRTC compiles nothing.\n")
    configs.write_text(package_configs.config_lists())
    cases.write_text("".join(case.text() for case in golden_cases.all_cases()))
    return [f"sources={sources}", f"configs={configs}", f"cases={cases}"]


def record(harness: Path, inputs: list[str]) -> dict:
    done = subprocess.run([harness, "record", *inputs], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def text(launches: dict) -> str:
    """Launches as JSON: a line for what a launch is, one for each tensor map and one for the rest
    of the parameters."""
    lines = []
    for name, launch in launches.items():
        params = launch["params"]
        maps = {key: value for key, value in params.items() if isinstance(value, dict)}
        scalars = {key: value for key, value in params.items() if key not in maps}
        launch = {key: value for key, value in launch.items() if key != "params"}
        parts = [f"  {json.dumps(name)}: {{", f'    "launch": {json.dumps(launch)},']
        parts += [f'    "{key}": {json.dumps(value)},' for key, value in maps.items()]
        parts += [f'    "params": {json.dumps(scalars)}', "  }"]
        lines.append("\n".join(parts))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    folder = builder.build("plain")
    with tempfile.TemporaryDirectory() as inputs:
        launches = record(folder / "harness", write_inputs(Path(inputs)))
    FILE.write_text(text(launches))


if __name__ == "__main__":
    main()
