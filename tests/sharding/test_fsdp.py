"""Weights sharded over the devices that share the tokens, and layers split among devices.

What a compiled training step moves: weights as FP8, after they are quantised where they live;
gradients onto the shards that they update; nothing else.
"""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, collectives_outside_loops, mesh

from jax_fp8gemm import matmul, quantize, quantize_both, quantize_weight
from jax_fp8gemm.checkpoint_policies import save_quantized
from jax_fp8gemm.moe import moe_mlp

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TOKENS, HIDDEN, INTER = 1024, 512, 1024  # of all devices; four or eight share them
# Programs that are read and not run: as XLA partitions them, without LLVM's work on the rest.
UNOPTIMISED = {"xla_backend_optimization_level": 0}


# The dimension of each result along which shards of rows, or of columns, follow one another.
QUANTIZERS = {
    "1x128": (quantize_both, ((0, 0, 1, 1), (1, 1, 0, 0))),
    "128x128": (
        functools.partial(quantize, block=(128, 128), with_transpose=True),
        ((0, 0, 1), (1, 1, 0)),
    ),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("quantizer, dims", QUANTIZERS.values(), ids=QUANTIZERS)
def test_quantising_and_gathering_commute(quantizer, dims, dim):
    on = mesh(AUTO, shape=(8,))
    shape = (1024, 256) if dim == 0 else (256, 1024)
    w = jax.random.normal(jax.random.key(dim), shape)
    gather = lambda x, dim: jax.lax.all_gather(x, "x", axis=dim, tiled=True)

    def both_orders(w):
        leaves, tree = jax.tree.flatten(quantizer(w))
        moved = [gather(x, d) for x, d in zip(leaves, dims[dim], strict=True)]
        return quantizer(gather(w, dim)), jax.tree.unflatten(tree, moved)

    spec = P("x") if dim == 0 else P(None, "x")
    shards = jax.shard_map(both_orders, mesh=on, in_specs=spec, out_specs=P(), check_vma=False)
    before, after = jax.jit(shards)(w)
    jax.tree.map(reference.assert_same_bits, after, before)


def layer(x, weights, *out_shardings):
    """Each product with its sharding, if given."""
    for w, out_sharding in itertools.zip_longest(weights, out_shardings):
        x = jax.nn.relu(matmul(x, w, out_sharding=out_sharding))
    return x


def compile_step(optimizer, weights, x, *out_shardings):
    """The compiled step of one layer, and the types of its state."""

    def loss(weights, x):
        return layer(x, weights, *out_shardings).astype(jnp.float32).mean()

    def step(weights, state, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    state = jax.eval_shape(optimizer.init, weights)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(weights, state, x)
    return lowered.compile(UNOPTIMISED), (weights, state)


def sharded(mesh, shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


# Each weight once for both passes, as it lies; and its scales, one for 128x128.
GATHERS = ["all-gather f32[4,8]", "all-gather f32[8,4]"] + [
    "all-gather f8e4m3fn[1024,512]",
    "all-gather f8e4m3fn[512,1024]",
]
# Over Explicit axes the scales of the second, whose gradient of the input is wanted, come twice.
EXPLICIT_GATHERS = [*GATHERS, "all-gather f32[8,4]"]
LOSS = "all-reduce f32[]"
# Axis types and shape of the mesh, where tokens and both weights lie; what is summed.
STEPS = {
    "rows of weights, adam": (
        (AUTO,),
        (4,),
        (("x",), ("x",)),
        optax.adam(1e-3),
        jnp.float32,
        [LOSS, "reduce-scatter f32[128,1024]", "reduce-scatter f32[256,512]"],
    ),
    "columns of weights, sgd": (
        (EXPLICIT,),
        (4,),
        (("x",), (None, "x")),
        optax.sgd(1e-3),
        jnp.bfloat16,
        [LOSS, "reduce-scatter f32[1024,128]", "reduce-scatter f32[512,256]"],
    ),
    "data x fsdp, adam": (
        (AUTO, AUTO),
        (4, 2),
        ((("x", "y"),), ("y",)),
        optax.adam(1e-3),
        jnp.bfloat16,
        # Scattered over y, then summed over x.
        [LOSS, "all-reduce f32[256,1024]", "all-reduce f32[512,512]"]
        + ["reduce-scatter f32[256,1024]", "reduce-scatter f32[512,512]"],
    ),
}


@pytest.mark.parametrize(
    "axis_types, shape, specs, optimizer, dtype, summed", STEPS.values(), ids=STEPS
)
def test_a_training_step(axis_types, shape, specs, optimizer, dtype, summed):
    on = mesh(*axis_types, shape=shape)
    x = sharded(on, (TOKENS, HIDDEN), dtype, *specs[0])
    weights = [sharded(on, shape, dtype, *specs[1]) for shape in ((HIDDEN, INTER), (INTER, HIDDEN))]
    out_shardings = [x.sharding] * 2 if EXPLICIT in axis_types else []
    compiled, state = compile_step(optimizer, weights, x, *out_shardings)
    gathers = EXPLICIT_GATHERS if EXPLICIT in axis_types else GATHERS
    assert collectives(compiled) == sorted(gathers + summed)
    *new_state, _ = compiled.out_info
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        if new.ndim:
            on_shards = NamedSharding(on, P(*specs[1]))
            assert new.sharding.is_equivalent_to(on_shards, new.ndim)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_tensor_parallel_layer(axis_type):
    """Columns, then rows: one sum forward, of the result, and one backward, of dx."""
    on = mesh(axis_type)
    x, dout = (sharded(on, (256, HIDDEN), jnp.bfloat16) for _ in range(2))
    weights = (
        sharded(on, (HIDDEN, INTER), jnp.bfloat16, None, "x"),
        sharded(on, (INTER, HIDDEN), jnp.bfloat16, "x"),
    )
    replicated = NamedSharding(on, P())
    out_shardings = [None, None if axis_type == AUTO else replicated]

    def forward_backward(x, weights, dout):
        out, pullback = jax.vjp(lambda x, w: layer(x, w, *out_shardings), x, weights)
        return out, *pullback(dout)

    shardings = (replicated, replicated, tuple(w.sharding for w in weights))
    jitted = jax.jit(forward_backward, out_shardings=shardings if axis_type == AUTO else None)
    compiled = jitted.lower(x, weights, dout).compile(UNOPTIMISED)
    assert collectives(compiled) == ["all-reduce f32[256,512]"] * 2


def gathered(compiled):
    """The number of elements that a program gathers: of arrays of weights, and of their scales."""
    texts = [text for text in collectives(compiled) if text.startswith("all-gather")]
    counts = [math.prod(map(int, text.rstrip("]").split("[")[1].split(","))) for text in texts]
    return sum(n for n in counts if n >= 128 * 128), sum(n for n in counts if n < 128 * 128)


@pytest.mark.parametrize(
    "policy", [None, save_quantized, "nothing"], ids=["residuals", "names", "nothing"]
)
def test_what_layers_gather(policy):
    """As many elements as bf16 weights, of half the bytes: once, or with jax.checkpoint twice.

    If jax.checkpoint saves quantised weights, those and what is quantised again are two arrays.
    """
    on, num_layers = mesh(AUTO), 3
    x = sharded(on, (512, HIDDEN), jnp.bfloat16, "x")
    weights = [sharded(on, (HIDDEN, HIDDEN), jnp.bfloat16, "x")] * num_layers

    def compiled(product):
        def apply(x, w):
            return jax.nn.relu(jax.lax.with_sharding_constraint(product(x, w), x_sharding))

        x_sharding = x.sharding
        if policy is not None:
            apply = jax.checkpoint(apply, policy=None if policy == "nothing" else policy)

        def loss(weights, x):
            for w in weights:
                x = apply(x, w)
            return x.astype(jnp.float32).mean()

        gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return gradients.lower(weights, x).compile(UNOPTIMISED)

    gathers = num_layers if policy is None else 2 * num_layers
    assert gathered(compiled(jnp.matmul)) == (gathers * HIDDEN**2, 0)
    gathers += num_layers if policy is save_quantized else 0
    blocks = (HIDDEN // 128) ** 2
    assert gathered(compiled(matmul)) == (gathers * HIDDEN**2, gathers * blocks)


def test_experts_gather_each_weight_once():
    on = mesh(AUTO)
    place = functools.partial(sharded, on)
    x = place((512, 512), jnp.bfloat16, "x")
    weights = [place((2, 512, n), jnp.bfloat16, None, "x") for n in (1024, 512)]
    # On Auto axes XLA may cut the columns of the result as the weights are.
    rows = lambda y: jax.lax.with_sharding_constraint(y, x.sharding)
    mlp = lambda x, w: rows(moe_mlp(x, *w, jnp.full((2,), 256, jnp.int32)))
    loss = lambda x, w: mlp(x, w).astype(jnp.float32).var()
    shards = [w.sharding for w in weights]
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=(x.sharding, shards))
    moved = collectives(gradients.lower(x, weights).compile(UNOPTIMISED))
    # The columns of both cotangents are gathered as well, (2, 512, 640).
    of_weights = [f"all-gather f8e4m3fn[2,512,{n}]" for n in (1024, 512)]
    assert [
        text for text in moved if "f8e4m3fn[2,512," in text and ",640]" not in text
    ] == of_weights


@pytest.mark.parametrize("axis_type, spec", [(AUTO, P("x")), (EXPLICIT, P(None, "x"))])
def test_gathered_weights_have_the_bits_of_whole_ones(axis_type, spec):
    """Also of those that are quantised before: both ways, or one alone."""
    on = mesh(axis_type)
    rng = np.random.default_rng(0)
    x, dout = (rng.normal(size=(512, 512)).astype(jnp.bfloat16) for _ in range(2))
    w = rng.normal(size=(512, 512)) * np.exp(rng.normal(size=(512, 1)))
    quantised = functools.partial(quantize, block=(128, 128))
    w = jnp.asarray(w, jnp.float32)
    weights = [w, quantize_weight(w), quantised(w), quantised(w, with_transpose="only")]

    def run(out_sharding, x, dout, weights):
        how = dict(out_sharding=out_sharding, preferred_element_type=jnp.bfloat16)
        product = lambda x: [matmul(x, w, **how) for w in weights]
        out, pullback = jax.vjp(product, x)
        return out, pullback([dout] * 4)

    def place(tree, spec):
        tree = jax.tree.map(np.asarray, tree)
        return jax.device_put(tree, NamedSharding(on, spec))

    rows = NamedSharding(on, P("x"))
    jitted = jax.jit(run, static_argnums=0)
    expected = jitted(None, *map(jnp.asarray, (x, dout)), weights)
    placed = place(x, rows.spec), place(dout, rows.spec), place(weights, spec)
    found = jitted(rows if axis_type == EXPLICIT else None, *placed)
    jax.tree.map(reference.assert_same_bits, found, expected)


# What layers in a scan keep, and what each loop then gathers.
SCANS = {"residuals": None, "names": save_quantized, "nothing": "nothing"}


@pytest.mark.parametrize("policy", SCANS.values(), ids=SCANS)
def test_layers_in_a_scan_gather_their_own_weights(policy):
    """One layer at a time: once in the loop forward, and once in the loop backward.

    There twice if jax.checkpoint saves quantised weights and no results.
    """
    on, num_layers = mesh(AUTO), 3
    x = sharded(on, (512, HIDDEN), jnp.bfloat16, "x")
    weights = sharded(on, (num_layers, HIDDEN, HIDDEN), jnp.bfloat16, None, "x")

    def apply(x, w):
        return jax.nn.relu(jax.lax.with_sharding_constraint(matmul(x, w), x_sharding)), None

    x_sharding = x.sharding
    if policy is not None:
        apply = jax.checkpoint(apply, policy=None if policy == "nothing" else policy)

    def step(weights, x):
        loss = lambda weights: jax.lax.scan(apply, x, weights)[0].astype(jnp.float32).mean()
        return weights - jax.grad(loss)(weights)

    compiled = jax.jit(step).lower(weights, x).compile(UNOPTIMISED)
    num_gathers = 3 if policy is save_quantized else 2
    gathers = ["all-gather f32[4,4]"] * num_gathers
    gathers += ["all-gather f8e4m3fn[512,512]"] * num_gathers
    assert collectives(compiled) == [*gathers, "reduce-scatter f32[128,512]"]
    assert collectives_outside_loops(compiled) == []
    # Gathered layers are not stacked.
    assert "[3,512,512]" not in compiled.as_text()


def what_each_reads(text):
    """By computation: the opcode of each instruction, and the names of all that it depends on."""
    for computation in re.split(r"\n(?=[%E])", text):
        opcodes, read = {}, {}
        for line in re.findall(r"^  (?:ROOT )?%(.*)", computation, re.MULTILINE):
            name, _, rest = line.partition(" = ")
            opcodes[name] = re.search(r" ([a-z-]+)\(", rest)[1]
            operands = [operand for operand in re.findall(r"%([\w.-]+)", rest) if operand in read]
            read[name] = set(operands).union(*(read[operand] for operand in operands))
        yield opcodes, read


def test_two_layers_in_a_step_of_a_scan():
    """What moves for one of them waits for no product of the other, and no product for it."""
    on = mesh(AUTO)
    x = sharded(on, (512, HIDDEN), jnp.bfloat16, "x")
    weights = sharded(on, (4, HIDDEN, HIDDEN), jnp.bfloat16, None, "x")

    def apply(x, w):
        return jax.nn.relu(jax.lax.with_sharding_constraint(matmul(x, w), x_sharding)), None

    def step(weights, x):
        scan = functools.partial(jax.lax.scan, apply, x, unroll=2)
        return weights - jax.grad(lambda weights: scan(weights)[0].astype(jnp.float32).mean())(
            weights
        )

    x_sharding = x.sharding
    compiled = jax.jit(step).lower(weights, x).compile(UNOPTIMISED)
    sums = ["reduce-scatter f32[128,512]"] * 2
    gathers = ["all-gather f32[4,4]"] * 4 + ["all-gather f8e4m3fn[512,512]"] * 4
    assert collectives(compiled) == gathers + sums
    num_loops = 0
    for opcodes, read in what_each_reads(compiled.as_text()):
        found = [name for name, opcode in opcodes.items() if opcode == "all-gather"]
        num_loops += bool(found)
        for name in found:  # on a CPU a product is a loop over k
            assert not [other for other in read[name] if opcodes[other] == "while"]
        for products in (name for name, opcode in opcodes.items() if found and opcode == "while"):
            assert not [other for other in read[products] if opcodes[other] == "reduce-scatter"]
    assert num_loops == 2
