"""A few of the random calls of `make fuzz`, the same in every run; and what it says of a process
that dies or hangs."""

import warnings

import jax
import numpy as np
import pytest
from errors import without_annotation_checks
from fuzz import calls, layers, products, run

SEED = 20261123


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_random_calls_end_in_a_result_or_a_sentence(start):
    with without_annotation_checks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(start, start + 100):
            call = calls.random_call(np.random.default_rng([SEED, i]))
            assert calls.fault(call) is None, (i, str(call))


@pytest.mark.parametrize("op", dict.fromkeys(products.OPS), ids=lambda op: op.__name__)
def test_random_products_are_those_of_float64(op):
    for i in range(3):
        assert op(np.random.default_rng([SEED, i])) is None, i


@pytest.mark.parametrize("start", range(0, 6, 2))
def test_random_layers_are_those_of_plain_jax(start):
    for i in range(start, start + 2):
        layer, fault = layers.random_layer(np.random.default_rng([SEED, i]))
        assert fault is None, (i, layer)


@pytest.mark.parametrize("name", ["logits", "x", "w_down"])
def test_a_gradient_that_vanishes_is_seen(monkeypatch, name):
    ours = layers._ours
    without = lambda p: p | {name: jax.lax.stop_gradient(p[name])}
    monkeypatch.setattr(layers, "_ours", lambda how, recipe, p: ours(how, recipe, without(p)))
    _, fault = layers.random_layer(np.random.default_rng([SEED, 0]))
    assert str(fault).startswith(f"{name} has an error of 1.000")


def test_a_layer_that_is_not_in_fp8_is_seen(monkeypatch):
    ours = layers._ours
    monkeypatch.setattr(layers, "_ours", lambda how, recipe, p: ours(how, layers.fp8.BF16, p))
    _, fault = layers.random_layer(np.random.default_rng([SEED, 0]))
    assert "has an error of 0.00" in str(fault)


def test_a_wrong_product_is_seen():
    lhs, rhs = np.ones((4, 128)), np.ones((128, 4))
    right = products.Sum.of(lhs, rhs)
    assert right.fault(np.full((4, 4), 128, np.float32)) is None
    wrong = np.full((4, 4), 128, np.float32)
    wrong[1, 2] = 128.01
    assert "at (1, 2), expected 128.0" in str(right.fault(wrong))
    assert right.fault(np.full((4, 4), np.nan, np.float32)) is not None


def test_an_unclear_error_is_seen(monkeypatch):
    call = calls.Call("matmul", [None, None], {}, is_legal=False)
    assert calls.fault(call) is None
    monkeypatch.setattr(calls.fp8, "matmul", lambda *_: {}["x"])
    assert str(calls.fault(call)).startswith("KeyError: ")
    monkeypatch.setattr(calls.fp8, "matmul", lambda *_: int("x"))
    assert str(calls.fault(call)).startswith("unclear ValueError: ")


@pytest.mark.parametrize(
    "program, said",
    [
        ("print('run 7', flush=True); import os; os.abort()", "died, exit status -6"),
        ("print('run 7', flush=True); import time; time.sleep(60)", "hung for 1 s, exit status -9"),
    ],
    ids=["death", "hang"],
)
def test_a_process_that_does_not_come_back(monkeypatch, capsys, program, said):
    monkeypatch.setattr(run, "DEADLINE", 1)
    monkeypatch.setattr(run.Share, "_command", lambda *_: [run.sys.executable, "-c", program])
    share = run.Share("calls", 0, 7, 8, 60)
    share.run()
    assert share.count == 1 and share.next == 8
    assert f"calls 7: {said}" in capsys.readouterr().out
