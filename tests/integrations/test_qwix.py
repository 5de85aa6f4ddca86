"""jax_fp8gemm.qwix: which products of a converted model run in FP8, and that all others stay."""

import functools
import importlib.util
import pathlib
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_diff_below
from errors import raises

import jax_fp8gemm as fp8

qwix = pytest.importorskip("qwix", reason="qwix is installed with the extra `test`")
from converted import products  # noqa: E402
from flax import linen, nnx  # noqa: E402

from jax_fp8gemm.qwix import Provider, Rule  # noqa: E402

# qwix calls a method of nnx.Module that flax has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*iter_modules:DeprecationWarning")
X = jax.random.normal(jax.random.key(0), (2, 8, 32), jnp.bfloat16)
STAYS, RUNS_IN_FP8 = dict(dot_general=1), dict(gemm=1)


def converted(model, provider=None):
    return qwix.quantize_model(model, provider or Provider(), skip_nnx_init=True)


class Function(nnx.Module):
    """A model of one function of x and a parameter of its own."""

    def __init__(self, function, shape=(32, 32)):
        self.function = function
        self.w = nnx.Param(jax.random.normal(jax.random.key(1), shape, jnp.bfloat16))

    def __call__(self, x):
        return self.function(x, self.w.get_value())


class Block(nnx.Module):
    def __init__(self, rngs, dot_general=jax.lax.dot_general):
        options = dict(dtype=jnp.bfloat16, use_bias=False, dot_general=dot_general)
        linear = functools.partial(nnx.Linear, 32, 32, **options)
        self.q, self.k, self.v, self.out = (linear(rngs=rngs) for _ in range(4))

    def __call__(self, x):
        attention = jax.nn.softmax(jnp.einsum("btd,bsd->bts", self.q(x), self.k(x)))
        return self.out(jnp.einsum("bts,bsd->btd", attention, self.v(x)))


class Layer(linen.Module):
    """The layer of a scan."""

    @linen.compact
    def __call__(self, x, _=None):
        y = linen.DenseGeneral((4, 8), dtype=jnp.bfloat16, name="heads")(x)
        y = linen.dot_product_attention(y, y, y)
        return linen.DenseGeneral(32, axis=(-2, -1), dtype=jnp.bfloat16, name="out")(y), None


def test_nnx_gives_what_the_hook_of_flax_gives():
    """The same program, with its gradient; q k^T and the product with v stay dots of XLA."""
    model, hooked = Block(nnx.Rngs(0)), Block(nnx.Rngs(0), fp8.dot_general)
    found = converted(model)
    assert products(lambda x: found(x), X) == dict(gemm=4, dot_general=2)
    assert products(lambda x: model(x), X) == dict(dot_general=6)

    def program(model):
        definition, state = nnx.split(model)
        loss = lambda state: (nnx.merge(definition, state)(X).astype(jnp.float32) ** 2).sum()
        return str(jax.make_jaxpr(jax.grad(loss))(state))

    assert program(found) == program(hooked) != program(model)


def test_linen_in_remat_and_scan():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            options = dict(variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return linen.scan(linen.remat(Layer), **options)(name="layers")(x, None)[0]

    model = Model()
    initialize = lambda model: jax.eval_shape(model.init, jax.random.key(0), X)
    params = initialize(model)
    found = qwix.quantize_model(model, Provider())
    assert initialize(found) == params
    run = lambda params: found.apply(params, X).astype(jnp.float32).sum()
    assert products(run, params) == dict(gemm=2, dot_general=2)
    gradient = jax.grad(run)
    # Forward; the first again, whose result the gradient of the second needs; two gradients each.
    assert products(gradient, params)["gemm"] == 2 + 1 + 4


def test_eager_and_with_an_input():
    """qwix runs the model once where it gets an input. The reference runs dots of its own there."""
    model = Function(jax.jit(lambda x, w: jnp.matmul(x, w)))
    found = qwix.quantize_model(model, Provider(), X)
    np.testing.assert_array_equal(found(X), fp8.matmul(X, model.w.get_value()))


CASES = {
    "@": (lambda x, w: x @ w, RUNS_IN_FP8),
    "matmul": (jnp.matmul, RUNS_IN_FP8),
    "dot": (lambda x, w: jnp.dot(x, w.T), RUNS_IN_FP8),
    "tensordot": (lambda x, w: jnp.tensordot(x, w, 1), RUNS_IN_FP8),
    "einsum": (lambda x, w: jnp.einsum("bti,io->bto", x, w), RUNS_IN_FP8),
    "einsum of three": (lambda x, w: jnp.einsum("bti,io,op->btp", x, w, w), dict(gemm=2)),
    "activations": (lambda x, w: jnp.einsum("bti,bsi->bts", x, x), STAYS),
    "activations by matmul": (lambda x, w: x @ x.mT, STAYS),
    "activations by vmap": (lambda x, w: jax.vmap(lambda x: x @ x.T)(x), STAYS),
    "weights by vmap of x": (lambda x, w: jax.vmap(lambda x: x @ w)(x), RUNS_IN_FP8),
    "no contraction": (lambda x, w: jnp.einsum("bti,oi->btoi", x, w), STAYS),
    "highest": (lambda x, w: jnp.dot(x, w, precision="highest"), STAYS),
    "algorithm": (lambda x, w: jnp.dot(x, w, precision="BF16_BF16_F32"), STAYS),
    "integers": (lambda x, w: jnp.ones((4, 4), int) @ jnp.ones((4, 4), int), STAYS),
    "f32 result": (lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32), RUNS_IN_FP8),
    "ours in bf16": (lambda x, w: fp8.matmul(x, w, recipe=fp8.BF16), STAYS),
}


@pytest.mark.parametrize("function, expected", CASES.values(), ids=CASES.keys())
def test_which_products(function, expected):
    model = converted(Function(function))
    assert products(lambda x: model(x), X) == expected
    plain = Function(function)
    assert "gemm" not in products(lambda x: plain(x), X)
    aval, plain_aval = (jax.eval_shape(lambda x, m=m: m(x), X) for m in (model, plain))
    assert (aval.shape, aval.dtype) == (plain_aval.shape, plain_aval.dtype)


def test_weights_with_a_batch_dimension():
    experts = lambda x, w: jnp.einsum("bti,bio->bto", x, w)
    model = converted(Function(experts, (2, 32, 32)))
    assert products(lambda x: model(x), X) == RUNS_IN_FP8
    # Derived from a parameter, of another shape: left alone.
    derived = lambda x, w: experts(x, w.reshape(2, 32, 32))
    model = converted(Function(derived, (64, 32)))
    assert products(lambda x: model(x), X) == STAYS


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {}),
        ((None, jnp.float32), {}),
        ((None,), dict(preferred_element_type=jnp.float32)),
        ((None, None, jnp.zeros(1, jnp.int32)), {}),
        ((), dict(group_offset=jnp.zeros(1, jnp.int32))),
    ],
)
def test_ragged_dot(args, kwargs):
    sizes = jnp.asarray([3, 5])
    run = lambda x, w: jax.lax.ragged_dot(x[0], w, sizes, *args, **kwargs)
    model = converted(Function(run, (2, 32, 16)))
    assert products(lambda x: model(x), X) == dict(grouped_gemm=1)
    expected = fp8.ragged_dot(X[0], model.w.get_value(), sizes, *args, **kwargs)
    np.testing.assert_array_equal(jax.jit(lambda x: model(x))(X), expected, strict=True)


@pytest.mark.parametrize("args, kwargs", [(("highest",), {}), ((), dict(precision="highest"))])
def test_a_ragged_dot_of_high_precision_stays(args, kwargs):
    sizes = jnp.asarray([3, 5])
    run = lambda x, w: jax.lax.ragged_dot(x[0], w, sizes, *args, **kwargs)
    model = converted(Function(run, (2, 32, 16)))
    assert "grouped_gemm" not in products(lambda x: model(x), X)


def test_the_first_rule_that_matches():
    rules = [Rule("k|v", None), Rule("(q|k|out)", fp8.HYBRID), Rule(".*", op_names=["einsum"])]
    provider = Provider(rules)
    model = converted(Block(nnx.Rngs(0)), provider)
    formats = re.findall(r"e5m2=(\w+)", str(jax.make_jaxpr(lambda x: model(x))(X)))
    assert products(lambda x: model(x), X) == dict(gemm=2, dot_general=4)
    assert set(formats) == {"False"}  # the forward format of both recipes
    _, pullback = jax.vjp(lambda x: model(x), X)
    assert "e5m2=True" in str(jax.make_jaxpr(pullback)(X))
    assert provider.get_unused_rules() == []


def test_linen_rules_by_path():
    model = linen.Sequential([linen.Dense(32, dtype=jnp.bfloat16), Layer()])
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    found = qwix.quantize_model(model, Provider([Rule("layers_1/(heads|out)")]))
    assert products(found.apply, params, X) == dict(gemm=2, dot_general=3)


def test_traces_stay_inside_the_model():
    """A jitted function that the model and others call is traced for each, whatever happens."""
    jitted = jax.jit(lambda x, w: x @ w)
    plain = Function(jitted)
    model = converted(plain)

    def fail(x, w):
        jitted(x, w)
        raise KeyError("in the model")

    failing = converted(Function(fail))
    for _ in range(2):
        assert products(lambda x: plain(x), X) == STAYS
        assert products(lambda x: model(x), X) == RUNS_IN_FP8
        with pytest.raises(KeyError, match="in the model"):
            failing(X)


def _run_of(kind):
    if kind == "nnx":
        model = converted(Block(nnx.Rngs(0)))
        return lambda x: model(x)
    layer = qwix.quantize_model(Layer(), Provider())
    params = Layer().init(jax.random.key(0), X)
    return lambda x: layer.apply(params, x)[0]


@pytest.mark.parametrize("kind, num_products", [("nnx", 4), ("linen", 2)])
def test_what_looks_into_a_converted_model_sees_its_products(kind, num_products):
    """A function of this package that runs the model is none that the model calls."""
    step = jax.jit(_run_of(kind))
    calls = [record["call"] for record in fp8.explain(step, X).records]
    assert calls.count("gemm") == num_products
    # What was traced within explain stays in the cache of jit.
    assert products(step, X)["gemm"] == num_products
    np.testing.assert_array_equal(step(X), jax.jit(_run_of(kind))(X))

    result, found = fp8.stats.collect(_run_of(kind))(X)
    operands = [record["operand"] for record in found.records()]
    assert (operands.count("lhs"), operands.count("rhs")) == (num_products, num_products)
    # Without FP8 it is 1e-3 away. XLA rounds what lies between products where it fuses nothing.
    assert_diff_below(1e-4, result, _run_of(kind)(X))


def test_two_threads():
    found, barrier = {}, threading.Barrier(2)

    def meet(x, w):
        barrier.wait(timeout=60)
        y = jax.jit(lambda x, w: x @ w)(x, w)
        barrier.wait(timeout=60)
        return y

    model = converted(Function(meet))
    run = lambda name: found.setdefault(name, products(lambda x: model(x), X))
    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == dict(a=RUNS_IN_FP8, b=RUNS_IN_FP8)
    assert products(lambda x: x @ x.mT, X) == STAYS


def test_wrong_arguments():
    with raises(TypeError, match=r"^qwix.Rule: recipe must be a jax_fp8gemm.Recipe, .*'e4m3'$"):
        Rule(".*", "e4m3")
    with raises(TypeError, match="^qwix.Provider: rules must be a sequence of Rule; got Rule"):
        Provider(Rule())
    with raises(TypeError, match="^qwix.Provider: each rule must be .*; got QuantizationRule"):
        Provider([qwix.QuantizationRule()])
    with raises(ValueError, match="^qwix.Provider: implementation must be"):
        Provider(implementation="triton")


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            dict(op_names=("dott",)),
            ValueError,
            r"op_names must be of \('dot_general', .*'dott',\)$",
        ),
        (dict(op_names=["dot", "conv"]), ValueError, r"op_names must be of .*\['dot', 'conv'\]$"),
        (dict(op_names=(jax.lax.dot_general,)), ValueError, "op_names must be of "),
        (
            dict(op_names="dot"),
            TypeError,
            r"op_names must be a tuple .*; got 'dot'\. Write op_name",
        ),
        (dict(op_names=None), TypeError, "op_names must be a tuple or a list .*; got None"),
        (dict(module_path="("), ValueError, r"module_path must be a regular .*; got '\(', missing"),
        (dict(module_path=fp8.HYBRID), TypeError, r"module_path must be .*e5m2.*Rule\(recipe="),
    ],
)
def test_a_wrong_rule_is_refused_when_it_is_made(arguments, error, message):
    with raises(error, match=f"^qwix.Rule: {message}"):
        Rule(**arguments)


def _import_anew():
    spec = importlib.util.find_spec("jax_fp8gemm.qwix")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_without_qwix(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match=r"^jax_fp8gemm.qwix: the package qwix, .* `pip install"):
        _import_anew()


def test_with_a_jax_that_does_not_tell_which_dimensions_are_mapped(monkeypatch):
    monkeypatch.delattr("jax._src.interpreters.batching.BatchTracer")
    with pytest.raises(ImportError, match=r"^jax_fp8gemm.qwix: jax must have .*BatchTracer; got"):
        _import_anew()


def test_nothing_else_imports_qwix():
    for path in pathlib.Path(fp8.__file__).parent.rglob("*.py"):
        if path.name != "qwix.py":
            assert not re.search(r"^\s*(import|from) [\w.]*qwix", path.read_text(), re.MULTILINE)
