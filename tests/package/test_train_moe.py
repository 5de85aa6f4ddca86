"""The training example: runs of recipes are pairs, and a run that goes on is the one that never
stopped, to the bit."""

import functools
import json
import pathlib
import runpy
import sys
import tarfile
import types

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_fp8gemm

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "train_moe"
DATA = pathlib.Path(json.__file__).parent
SIZES = ["--batch", "8", "--length", "32", "--steps", "6", "--evaluate-every", "3", "--data", DATA]
SMALL = [*SIZES, "--micro-batches", "2"]


@pytest.fixture(scope="module")
def run():
    """Runs a command of the example with the settings of a new process, not those of tests."""
    main = runpy.run_path(str(EXAMPLE))["main"]

    def run(*args):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return main([str(arg) for arg in args])

    return run


def lines(folder, kind):
    read = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in read if line["kind"] == kind]


def column(folder, name):
    return [line[name] for line in lines(folder, "step")]


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """A run of six steps in FP8 that never stopped."""
    out = tmp_path_factory.mktemp("whole")
    run("train", "--out", out, *SMALL)
    return out


def test_a_run_learns_and_says_how_fast(whole):
    assert [line["step"] for line in lines(whole, "step")] == list(range(1, 7))
    losses = column(whole, "loss")
    # The head begins small: log(256) = 5.545. The bytes that sources consist of are learnt at once.
    assert 5.4 < losses[0] < 5.7 and losses[-1] < losses[0] - 0.5
    rates = column(whole, "rate")
    assert rates[0] == 0 and rates[1] == max(rates) > 10 * rates[-1] > 0
    held_out = [line["loss"] for line in lines(whole, "evaluation")]
    assert len(held_out) == 2 and held_out[1] < held_out[0]
    for line in lines(whole, "step"):
        assert line["tokens_per_s"] * line["seconds"] == pytest.approx(8 * 32)
        assert line["grad_norm"] > 0 and 1 <= line["max_load"] <= 4


def test_statistics_name_the_modules_and_change_no_bit(run, whole, tmp_path, capsys):
    run("train", "--out", tmp_path, *SMALL, "--stats-every", 3, "--stop-after", 4)
    (found,) = lines(tmp_path, "stats")
    assert found["step"] == 3
    operands = {(x["path"], x["operand"]) for x in found["operands"]}
    blocks = [f"blocks/{i}/{name}" for i in range(2) for name in ("qkv", "out", "mlp")]
    assert operands == {(path, of) for path in blocks for of in ("lhs", "rhs", "dout")}
    for operand in found["operands"]:
        # Three bits of mantissa: 2.6 % of normal numbers.
        assert 0.02 < operand["error"] < 0.03 and operand["nonfinite"] == 0
    assert "stats 3: " in capsys.readouterr().out
    assert column(tmp_path, "loss") == column(whole, "loss")[:4]


def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(run, whole, tmp_path):
    run("train", "--out", tmp_path, *SMALL, "--stop-after", 4)
    (stop,) = lines(tmp_path, "stop")
    # What a process that was killed after the checkpoint leaves behind.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(dict(kind="step", step=5, loss=0.0)) + '\n{"kind": "st')
    run("train", "--out", tmp_path, *SMALL)
    (end,), (expected,) = lines(tmp_path, "end"), lines(whole, "end")
    assert end["state"] == expected["state"] != stop["state"]
    for name in ("loss", "batch", "grad_norm"):
        assert column(tmp_path, name) == column(whole, name)


def test_a_checkpoint_goes_on_with_another_recipe_and_no_other_run(run, whole, tmp_path):
    run("train", "--out", tmp_path, *SMALL, "--stop-after", 4)
    with pytest.raises(ValueError, match="a run that goes on must be the one of its checkpoint"):
        run("train", "--out", tmp_path, *SMALL, "--seed", 1)
    run("train", "--out", tmp_path, *SMALL, "--recipe", "bf16")
    assert [line["recipe"] for line in lines(tmp_path, "start")] == ["Recipe()", "Recipe(fwd=None)"]
    losses, others = column(tmp_path, "loss"), column(whole, "loss")
    assert losses[:4] == others[:4] and losses[4:] != others[4:]


def test_recipes_of_a_seed_see_the_same_and_a_sweep_goes_on(run, whole, tmp_path):
    how = "sweep", "--out", tmp_path, *SMALL, "--recipes", "bf16", "deepseek_v3", "--seeds", "0"
    assert run(*how, "--seconds", 0) == 3 and not list(tmp_path.iterdir())
    assert run(*how, "--seconds", 600) == 0
    names = ("bf16-0", "deepseek_v3-0")
    bf16, fp8 = (tmp_path / name for name in names)
    assert column(bf16, "batch") == column(fp8, "batch") == column(whole, "batch")
    assert len(set(column(bf16, "batch"))) == 6
    # The same initial values: the first losses differ by the rounding of one forward pass.
    first = column(bf16, "loss")[0], column(fp8, "loss")[0]
    assert 0 < abs(first[0] - first[1]) < 0.03
    assert column(fp8, "loss") == column(whole, "loss")
    written = [(tmp_path / name / "metrics.jsonl").stat().st_mtime_ns for name in names]
    assert run(*how, "--seconds", 600) == 0
    assert written == [(tmp_path / name / "metrics.jsonl").stat().st_mtime_ns for name in names]
    run("plot", tmp_path)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_recipes_go_on_from_one_run_of_bf16(run, tmp_path):
    how = "sweep", "--out", tmp_path, *SMALL, "--seeds", 0, "--fork-at", 3
    # It waits for the process that has bf16.
    assert run(*how, "--recipes", "deepseek_v3", "--seconds", 0.5) == 3
    assert run(*how, "--recipes", "bf16", "bf16_again", "fp4", "--seconds", 600) == 0
    assert run(*how, "--recipes", "deepseek_v3", "--seconds", 600) == 0
    assert column(tmp_path / "fork-0", "step") == [1, 2, 3]
    first = {}
    for name in ("bf16", "bf16_again", "fp4", "deepseek_v3"):
        assert column(tmp_path / f"{name}-0", "step") == [4, 5, 6]
        first[name] = column(tmp_path / f"{name}-0", "loss")[0]
    assert len(set(first.values())) == 4
    assert all(abs(loss - first["bf16"]) < 0.05 for loss in first.values()), first


def test_another_seed_sees_other_batches(run, whole, tmp_path):
    text = runpy.run_path(str(EXAMPLE / "text.py"))["Text"]
    first, again, other = (text(DATA, 32, 4, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.at(5), again.at(5))
    assert (first.at(5) != other.at(5)).any()
    # An epoch has every window once, and none that is held out.
    per_epoch = len(first.starts) // 4
    assert per_epoch * 4 <= len(set(first.starts)) and not set(first.starts) & set(first.held_out)
    assert (first.at(0) != first.at(per_epoch)).any()
    np.testing.assert_array_equal(first.to_evaluate(2), other.to_evaluate(2))


def test_it_trains_alike_on_a_mesh_and_without_micro_batches(run, whole, tmp_path, capsys):
    run("train", "--out", tmp_path, *SIZES, "--stop-after", "2", "--mesh", "fsdp=2,expert=4")
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in ("tokens_per_s", "tflops", "peak_bytes"))
    # Tokens are those of all eight devices, TFLOPS those of each.
    (start,), (stop,) = lines(tmp_path, "start"), lines(tmp_path, "stop")
    flop = start["flop_per_token"]
    assert stop["tflops"] * 8e12 == pytest.approx(flop * stop["tokens_per_s"], rel=1e-9)
    assert column(tmp_path, "batch") == column(whole, "batch")[:2]
    # Tokens travel with scales that are powers of two, so a loss moves as by another recipe. A
    # batch is one part here and two there, so the gradients of parts add up to that of the batch.
    np.testing.assert_allclose(column(tmp_path, "loss"), column(whole, "loss")[:2], atol=0.03)
    norms = column(tmp_path, "grad_norm"), column(whole, "grad_norm")[:2]
    np.testing.assert_allclose(*norms, rtol=0.05)


@pytest.fixture(scope="module")
def controls():
    return runpy.run_path(str(EXAMPLE / "controls.py"))


FORMATS = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M1": ml_dtypes.float4_e2m1fn,
}


def rounded(x, blocks, dtype):
    """x in `dtype` with a scale for each block of the sizes `blocks`, by NumPy; None: no scale."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    if blocks is None:
        return np.clip(x, -largest, largest).astype(dtype).astype(np.float64)
    (m, n), (rows, columns) = x.shape, blocks
    parts = x.reshape(m // rows, rows, n // columns, columns)
    scale = np.abs(parts).max(axis=(1, 3), keepdims=True) / largest
    values = (parts / scale).astype(dtype).astype(np.float64)
    return (values * scale).reshape(m, n)


# Blocks of lhs, rhs and dout, (along the contraction, across it), in the order of the product.
BLOCKS = {
    "per_tensor": [(256, 256)] * 3,
    "unscaled": [None] * 3,
    # Sums in the tensor core err by what a CPU does not show.
    "no_promotion": [(256, 256)] * 3,
    "square_dout": [(128, 1), (128, 128), (128, 128)],
    "e5m2": [(128, 1)] * 3,
    "fp4": [(128, 1)] * 3,
}
OTHER_FORMATS = {"e5m2": "E5M2", "fp4": "E2M1"}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_control_rounds_what_it_multiplies(controls, name, grouped):
    random = np.random.default_rng(0)
    spread = lambda: random.standard_normal((256, 256)) * 10 ** random.uniform(-3, 0, (256, 1))
    # Quotients of bf16 may be ties of a short mantissa, which the last bit of a scale decides.
    dtype = np.float32 if name in OTHER_FORMATS else ml_dtypes.bfloat16
    lhs, rhs, dout = (spread().astype(dtype) for _ in range(3))
    sizes = np.array([256]) if grouped else None
    product = lambda lhs, rhs: controls["product"](controls["CONTROLS"][name], lhs, rhs, sizes)
    out, vjp = jax.vjp(
        product, jax.numpy.asarray(lhs), jax.numpy.asarray(rhs[None] if grouped else rhs)
    )
    of_lhs, of_rhs, of_dout = BLOCKS[name]
    rounding = functools.partial(rounded, dtype=FORMATS[OTHER_FORMATS.get(name, "E4M3")])
    lhs, rhs, dout32 = (x.astype(np.float32) for x in (lhs, rhs, dout))
    turned = lambda blocks: blocks and blocks[::-1]
    left = lambda x, blocks: rounding(x, turned(blocks))  # contracted along its columns
    expected = [
        left(lhs, of_lhs) @ rounding(rhs, of_rhs),
        left(dout32, of_dout) @ rounding(rhs, turned(of_rhs)).T,
        rounding(lhs, of_lhs).T @ rounding(dout32, of_dout),
    ]
    for found, truth in zip([out, *vjp(jax.numpy.asarray(dout))], expected, strict=True):
        found = np.asarray(found, np.float64).reshape(256, 256)
        # Operands and results are rounded to bf16, 2^-9 each. Leaving out e4m3 errs by 3e-2.
        assert np.linalg.norm(found - truth) < 4e-3 * np.linalg.norm(truth)


@pytest.mark.parametrize("name", FORMATS)
def test_a_control_has_the_values_of_its_format(controls, name):
    """Every value, what lies half-way between two, and its neighbours."""
    dtype = FORMATS[name]
    count = 16 if name == "E2M1" else 256
    values = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / 2
    beside = (np.nextafter(ties, np.float32(side)) for side in (-1e9, 1e9))
    x = np.concatenate([values, ties, *beside, np.float32([-1e9, 449, 1e-30])])
    largest = values[-1]
    want = np.clip(x, -largest, largest).astype(dtype).astype(np.float32)
    round_to = functools.partial(controls["to_format"], kind=controls[name])
    np.testing.assert_array_equal(jax.jit(round_to)(x), want)


def test_tokamax_multiplies_by_group_where_it_is_asked_to(controls, monkeypatch):
    """A module in its place: the real one has kernels for GPUs only."""
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(SystemExit, match="pip install tokamax"):
        controls["with_tokamax"](jax_fp8gemm.BF16)
    given = []

    def ragged_dot(lhs, rhs, sizes, implementation):
        given.append(implementation)
        return jax_fp8gemm.ragged_dot(lhs, rhs, sizes, recipe=jax_fp8gemm.BF16)

    stands_in = types.SimpleNamespace(ragged_dot=ragged_dot)
    monkeypatch.setitem(sys.modules, "tokamax", stands_in)
    assert controls["with_tokamax"](jax_fp8gemm.HYBRID) is jax_fp8gemm.HYBRID
    assert controls["with_tokamax"](controls["CONTROLS"]["unscaled"]).name == "unscaled"
    control = controls["with_tokamax"](jax_fp8gemm.BF16)
    random = np.random.default_rng(0)
    draw = lambda *shape: jax.numpy.asarray(random.standard_normal(shape), jax.numpy.bfloat16)
    lhs, rhs, sizes, dout = draw(32, 128), draw(2, 128, 64), np.array([20, 12]), draw(32, 64)
    found, vjp = jax.vjp(lambda *x: controls["product"](control, *x, sizes), lhs, rhs)
    product = functools.partial(jax_fp8gemm.ragged_dot, group_sizes=sizes, recipe=jax_fp8gemm.BF16)
    expected, expected_vjp = jax.vjp(product, lhs, rhs)
    for x, y in zip([found, *vjp(dout)], [expected, *expected_vjp(dout)], strict=True):
        np.testing.assert_array_equal(x, y)
    assert set(given) == {"mosaic"}


def test_bf16_again_begins_elsewhere_by_less_than_a_rounding(run, tmp_path):
    for name in ("bf16", "bf16_again"):
        run("train", "--out", tmp_path / name, *SMALL, "--recipe", name, "--stop-after", 2)
    first, again = (column(tmp_path / name, "loss") for name in ("bf16", "bf16_again"))
    assert column(tmp_path / "bf16", "batch") == column(tmp_path / "bf16_again", "batch")
    assert 0 < abs(first[0] - again[0]) < 5e-3


def test_casts_without_scales_learn_less(run, whole, tmp_path):
    run("train", "--out", tmp_path, *SMALL, "--recipe", "unscaled")
    unscaled, scaled = (lines(folder, "evaluation")[-1]["loss"] for folder in (tmp_path, whole))
    assert unscaled > scaled + 0.1


def write_run(folder, losses, held_out):
    """Writes the metrics of a run that ended."""
    step = dict(kind="step", tokens_per_s=100.0, tflops=2.0)
    rows = [dict(kind="start", step=0, peak_bytes=3e9)]
    rows += [step | dict(step=i + 1, loss=loss) for i, loss in enumerate(losses)]
    rows += [dict(kind=kind, step=len(losses), loss=held_out) for kind in ("evaluation", "end")]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_plot_has_runs_that_go_further_than_a_seed_of_bf16(run, tmp_path):
    for name, steps in (("bf16-0", 20), ("deepseek_v3-0", 20), ("bf16-1", 10)):
        write_run(tmp_path / name, [1.0] * steps, 1.0)
    run("plot", tmp_path)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_is_of_pairs_of_seeds(run, tmp_path, capsys):
    flat = lambda last: [5.0] * 18 + [last] * 2  # the last tenth is two steps
    above = {"deepseek_v3": (0.01, 0.03), "fp4": (0.05, 0.06), "e5m2": (0.01, 0.04)}
    for seed, loss in enumerate((1.0, 2.0)):
        write_run(tmp_path / f"bf16-{seed}", flat(loss), loss)
        write_run(tmp_path / f"bf16_again-{seed}", flat(loss * (1 + 0.01 * seed)), loss)
        for name, of_seeds in above.items():
            more = loss * (1 + of_seeds[seed])
            write_run(tmp_path / f"{name}-{seed}", flat(more), loss * (1 + 2 * of_seeds[seed]))
    # It has no pair.
    write_run(tmp_path / "pow2_scale-7", flat(3.0), 3.0)
    assert run("summary", tmp_path) == 0
    gaps, told, costs = capsys.readouterr().out.strip().split("\n\n")
    rows = dict(line[2:].split(" | ", 1) for line in gaps.splitlines())
    # Standard errors of (1, 3) and of (2, 6): 1 and 2.
    assert rows["deepseek_v3"] == "2 | 1.5350 | +2.000 ± 1.000 | +4.000 ± 2.000 | - | - |"
    # 1.05 / 1.01 and 1.06 / 1.03: 3.960 and 2.913 percent; half their difference is the error.
    assert rows["fp4"] == "2 | 1.5850 | +5.500 ± 0.500 | +11.000 ± 1.000 | +3.437 ± 0.524 | yes |"
    assert rows["e5m2"].endswith("| no |") and rows["bf16_again"].endswith("| - |")
    assert rows["pow2_scale"] == "1 | 3.0000 | - | - | - | - |"
    # Of (1, 2), whose mean is 1.5, and of (0, 1) percent.
    assert "over seeds: 47.140 %. Of the gap of bf16_again: 0.707 %." in told
    assert "| fp4 | 100 | 2 | 3.0 |" in costs


@pytest.mark.parametrize(
    "heading, archive, folder, is_in_readme",
    [
        ("Recipes that go on from one run", "training_30m", "training_30m/forks", True),
        ("The same with 291 M parameters", "training_300m_forks", "training_300m_forks", True),
        ("Three thousand steps", "training_300m_3000", "training_300m_3000", True),
        ("Documents whose loss counts little", "training_light", "training_light", False),
        (
            "The same documents with 30 M parameters",
            "training_light_30m",
            "training_light_30m",
            False,
        ),
    ],
)
def test_the_page_and_readme_quote_the_summary_of_the_stored_metrics(
    run, tmp_path, capsys, heading, archive, folder, is_in_readme
):
    root = EXAMPLE.parents[1]
    with tarfile.open(root / f"benchmarks/results/{archive}.tar.xz") as stored:
        stored.extractall(tmp_path, filter="data")
    run("summary", tmp_path / folder)
    gaps = capsys.readouterr().out.split("\n\n")[0]
    page = (root / "docs/convergence.md").read_text()
    section = page.split(f"### {heading}\n")[1].split("\n#")[0]
    quoted = {row[0].removesuffix(", a control"): row[1:] for row in table(section)}
    # The page leaves bf16 out, which has no gap, and the losses.
    expected = {row[0]: [row[1], *row[3:]] for row in table(gaps) if row[0] != "bf16"}
    assert quoted == expected
    gap = quoted["deepseek_v3"][1].removeprefix("+").partition(" ")[0]
    assert (f" {gap} %" in (root / "README.md").read_text()) == is_in_readme


def table(text):
    """The rows of a Markdown table, as lists of cells."""
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[2:]


def test_weights_are_quantised_once_for_all_micro_batches(run, whole, tmp_path):
    run("train", "--out", tmp_path, *SMALL, "--stop-after", "2", "--quantize-each")
    # XLA on a CPU may round a last sum elsewhere in another program: quantised values are the same.
    for name in ("loss", "grad_norm"):
        found, expected = column(tmp_path, name), column(whole, name)[:2]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
