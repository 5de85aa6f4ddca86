"""`bench tile-times`: what it writes, and that its configs have kernels."""

import contextlib
import json

import jax.numpy as jnp
import pytest
from ext_program import run

from benchmarks import grouped_tile_programs, tile_programs, tile_times
from benchmarks.case import tile_text
from benchmarks.problem import GroupedShape
from benchmarks.shapes import draw_groups_of_classes, draw_shapes_of_classes, row_shapes
from benchmarks.tile_candidates import (
    all_candidates,
    all_grouped_candidates,
    candidates,
    grouped_candidates,
)
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

        if isinstance(shape, GroupedShape):
            return {c: threads.submit(make, c) for c in grouped_candidates(shape.m)}
        return {c: threads.submit(make, c) for c in candidates(shape.m, shape.k)}

    monkeypatch.setattr(tile_times, "_programs_of", programs)
    monkeypatch.setattr(tile_times, "cupti", lambda: cupti)
    monkeypatch.setattr(tile_times, "_FLUSH_BYTES", 1024)
    monkeypatch.setattr(tile_times, "compile_kernels", lambda configs, kernel, jobs: [])
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


def test_rows_of_groups_say_their_sizes(fake_device, tmp_path, monkeypatch):
    few = [GroupedShape(3, 64, 128, 2), GroupedShape(300, 64, 128, 1, empty=1)]
    monkeypatch.setattr(tile_times, "draw_groups_of_classes", lambda num, seed: few)
    file = tmp_path / "times.json"
    assert tile_times.main(["--out", str(file), "--family", "ragged", "--rounds", "1"]) == 0
    rows = json.loads(file.read_text())["rows"]
    same = dict(n=64, k=128, sizes="even")
    assert same | dict(groups=2, expected_rows=3, rows=5, empty=0) == _labels(rows[0])
    assert same | dict(groups=2, expected_rows=300, rows=323, empty=1) == _labels(rows[1])
    assert list(rows[1]["us"]) == [tile_text(c) for c in grouped_candidates(300)]


def _labels(row):
    return {key: value for key, value in row.items() if key not in ("us", "wrong")}


def test_groups_are_drawn_of_each_class_and_named_rows_come_last():
    shapes = draw_groups_of_classes(12, seed=3)
    assert shapes == draw_groups_of_classes(12, seed=3) != draw_groups_of_classes(12, seed=4)
    most = [8, 32, 64, 160, 640, 8192] * 2
    assert all(shape.m <= m for shape, m in zip(shapes, most, strict=True))
    assert all(s.groups * (s.n or 0) * s.k <= 1e9 for s in shapes)


@pytest.mark.parametrize("rows", ["all", "held-out", "curve"])
def test_candidates_of_groups_hold_what_a_call_chooses(rows):
    how = dict(is_1d1d=False, out_f32=False, accumulate=False)
    for shape in row_shapes("ragged", rows):
        assert isinstance(shape, GroupedShape) and shape.n
        groups = shape.groups + shape.empty
        found = grouped_candidates(shape.m)
        if not shape.empty:  # the choice knows the mean of all groups, empty ones included
            assert choose.choose(groups * shape.m, shape.n, shape.k, groups, **how) in found


def test_it_needs_the_kernels(monkeypatch, capsys):
    monkeypatch.setattr(tile_times, "compile_kernels", lambda configs, kernel, jobs: [])
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
    kinds = (
        (tile_programs.KERNEL, all_candidates),
        (
            grouped_tile_programs.KERNEL,
            all_grouped_candidates,
        ),
    )
    configs = [dict(c.attributes(**kernel)) for kernel, all_of in kinds for c in all_of()]
    code = f"""
        for config in {[{k: int(v) for k, v in c.items()} for c in configs]}:
            try:
                ext.compile_gemm(config)
            except RuntimeError as error:
                assert str(error).startswith("NVRTC "), error
        """
    status, _, error = run(code, nvrtc_paths=["/none/libnvrtc.so"])
    assert status == 0, error
