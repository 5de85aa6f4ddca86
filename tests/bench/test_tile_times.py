"""`bench tile-times`: what it writes, and that its configs have kernels."""

import contextlib
import json

import jax.numpy as jnp
import pytest
from ext_program import run

from benchmarks import tile_programs, tile_times
from benchmarks.case import tile_text
from benchmarks.shapes import draw_shapes_of_classes
from benchmarks.tile_candidates import all_candidates, candidates
from benchmarks.timing.cupti import Activity
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import choose


class _Cupti:
    """Sees a flush and a product for each call, and says that the n-th call took n us."""

    def __init__(self):
        self.num_calls = 0

    @contextlib.contextmanager
    def record(self):
        activities, first = [], self.num_calls
        yield activities
        for i in range(first, self.num_calls):
            activities += [Activity("fill", 0, 9), Activity("fp8_gemm_1d2d", 0, 1000 * (i + 1))]


@pytest.fixture
def fake_device(monkeypatch):
    """Programs that compute nothing, one with other bits, and a clock for them."""
    cupti = _Cupti()

    def programs(shape, threads):
        def make(config):
            def program(*operands):
                cupti.num_calls += 1
                return jnp.full((4, 8), config.block_n == 96, jnp.bfloat16)

            return program

        return {c: threads.submit(make, c) for c in candidates(shape.m, shape.k)}

    monkeypatch.setattr(tile_times, "programs_of", programs)
    monkeypatch.setattr(tile_times, "cupti", lambda: cupti)
    monkeypatch.setattr(tile_times, "_FLUSH_BYTES", 1024)
    monkeypatch.setattr(tile_times, "compile_kernels", lambda configs, jobs: [])
    monkeypatch.setattr(extension, "unavailable_reason", lambda: None)


def test_each_row_has_the_time_of_every_config(fake_device, tmp_path):
    file = tmp_path / "times.json"
    arguments = ["--out", str(file), "--random", "6", "--rounds", "3", "--jobs", "1"]
    assert tile_times.main(arguments) == 0
    content = json.loads(file.read_text())
    assert {"device", "commit", "versions", "rounds", "seed"} < set(content)
    shapes = draw_shapes_of_classes(6, seed=1)
    assert [(r["m"], r["n"], r["k"]) for r in content["rows"]] == [(s.m, s.n, s.k) for s in shapes]
    for row in content["rows"]:
        tiles = [tile_text(c) for c in candidates(row["m"], row["k"])]
        assert list(row["us"]) == tiles
        others = [tile for tile in tiles if "x96/" in tile]
        is_compared = row["m"] * row["n"] <= tile_times._MOST_COMPARED
        assert row.get("wrong", []) == (others if is_compared else [])
    # Three calls of each config of the first row count, after one that does not.
    num = len(candidates(shapes[0].m, shapes[0].k))
    assert all(num < us <= 4 * num for us in content["rows"][0]["us"].values())


def test_it_needs_the_kernels(monkeypatch, capsys):
    monkeypatch.setattr(tile_times, "compile_kernels", lambda configs, jobs: [])
    monkeypatch.setattr(extension, "unavailable_reason", lambda: "no GPU")
    assert tile_times.main(["--out", "unused"]) == 1
    assert "got: no GPU" in capsys.readouterr().out


@pytest.mark.parametrize("m", [1, 16, 17, 32, 33, 64, 65, 192, 193, 1024, 1025, 16384])
def test_candidates_hold_what_a_call_chooses(m):
    how = dict(is_1d1d=False, out_f32=False, accumulate=False)
    found = candidates(m, 4096)
    assert len(set(found)) == len(found)
    assert {choose.choose(m, n, k, **how) for n in (512, 4096) for k in (512, 8192)} <= set(found)


def test_every_candidate_has_a_kernel():
    """The config is accepted, and then there is no NVRTC to compile it."""
    configs = [dict(c.attributes(**tile_programs.KERNEL)) for c in all_candidates()]
    code = f"""
        for config in {[{k: int(v) for k, v in c.items()} for c in configs]}:
            try:
                ext.compile_gemm(config)
            except RuntimeError as error:
                assert str(error).startswith("NVRTC "), error
        """
    status, _, error = run(code, nvrtc_paths=["/none/libnvrtc.so"])
    assert status == 0, error
