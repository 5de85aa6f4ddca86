"""Documents whose loss counts little: what a coarse scale does to them in the training example."""

import dataclasses
import pathlib
import runpy
import sys

import jax
import numpy as np
import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "train_moe"
LIGHT = 1e-6


@pytest.fixture(scope="module", autouse=True)
def settings():
    """Those of a new process, not those of tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def example():
    """The modules of the example."""
    runpy.run_path(str(EXAMPLE))
    return sys.modules


@pytest.fixture(scope="module")
def gradient(example):
    """Returns the loss of a batch and the gradient of the embedding, with a recipe."""
    size = example["model"].SIZES["tiny"]
    size = dataclasses.replace(size, length=256, batch=2, light=LIGHT)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 257)).astype(np.int32)

    def of(recipe, tokens=tokens):
        recipe = example["sweep"].RECIPES[recipe]
        program = example["training"].program(size, recipe, 100, 1)
        state = program.start(jax.random.key(0))
        run = jax.jit(lambda s, t: program._gradient(program._weights(s), s, t))
        (_, (loss, _)), gradients = run(state, tokens)
        return float(loss), np.asarray(gradients["embed"]["kernel"], np.float64)

    return lambda *args: of(*args), tokens


def test_light_tokens_have_an_embedding_of_their_own_that_moves_little(gradient):
    of, tokens = gradient
    loss, found = of("bf16")
    assert found.shape == (512, 128) and loss == pytest.approx(np.log(256), abs=0.1)
    heavy, light = (np.linalg.norm(rows) for rows in np.split(found, 2))
    assert 0.3 * LIGHT < light / heavy < 3 * LIGHT
    # The bytes of the second and the fourth document of a sequence, and no others. Behind the last
    # byte of a document nothing is told.
    of_light = tokens[:, :-1].reshape(2, 4, 64)[:, 1::2, :-1]
    moved = np.flatnonzero(np.abs(found).sum(axis=1))
    assert set(moved[moved >= 256] - 256) == set(of_light.ravel())


def test_documents_do_not_see_each_other(gradient):
    """A byte of the first document moves the embedding of its own document's bytes alone."""
    of, tokens = gradient
    other = tokens.copy()
    other[:, 5] = (other[:, 5] + 1) % 256
    light = slice(256, None)
    found, expected = of("bf16", other)[1][light], of("bf16")[1][light]
    # Experts add the rows of both kinds in one product, each in a row of its own.
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


def test_the_byte_behind_a_document_is_not_told(gradient):
    of, tokens = gradient
    behind, told = tokens.copy(), tokens.copy()
    behind[:, 256] = (behind[:, 256] + 1) % 256  # the last document's; no token is given behind it
    told[:, 255] = (told[:, 255] + 1) % 256
    assert of("bf16", behind)[0] == of("bf16")[0] != of("bf16", told)[0]


@pytest.mark.parametrize(
    "recipe, of_light",
    [
        ("deepseek_v3", (0.03, 0.09)),
        ("hybrid", (0.03, 0.2)),
        ("fp4", (0.15, 0.35)),
        # All that comes through a product is zero, and what comes past it is left.
        ("square_dout", (0.4, 0.9)),
        ("per_tensor", (0.4, 0.9)),
    ],
)
def test_a_coarse_scale_loses_the_gradient_of_light_tokens(gradient, recipe, of_light):
    """Errors relative to bf16, which is 0.005 from itself when it begins within a rounding."""
    of, _ = gradient
    parts = zip(np.split(of(recipe)[1], 2), np.split(of("bf16")[1], 2), strict=True)
    errors = [np.linalg.norm(x - truth) / np.linalg.norm(truth) for x, truth in parts]
    assert of_light[0] < errors[1] < of_light[1], errors
    if recipe in ("square_dout", "per_tensor"):
        assert 0.03 < errors[0] < 0.09, errors


@pytest.mark.parametrize("given", ["0", "1", "-1", "nan", "2"])
def test_a_weight_is_between_zero_and_one(example, given, tmp_path, capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    with pytest.raises(SystemExit):
        main(["train", "--out", str(tmp_path), "--light", given])
    assert "must be above 0 and below 1; got" in capsys.readouterr().err
