"""Weights sharded over the devices that share the tokens, and layers split among devices.

What a compiled training step moves: weights as FP8, after they are quantised where they live;
gradients onto the shards that they update; nothing else.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, collectives_outside_loops, mesh

from jax_fp8gemm import matmul, quantize, quantize_both

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


# Once forward and once backward, transposed; the first layer has no gradient of its input. Their
# scales: one for 128x128.
GATHERS = (
    ["all-gather f32[4,8]"]
    + ["all-gather f32[8,4]"] * 2
    + ["all-gather f8e4m3fn[1024,512]"] * 2
    + ["all-gather f8e4m3fn[512,1024]"]
)
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
    assert collectives(compiled) == sorted(GATHERS + summed)
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


def test_layers_in_a_scan_gather_their_own_weights():
    """With jax.checkpoint also those of the backward pass are gathered one layer at a time."""
    on, num_layers = mesh(AUTO), 3
    x = sharded(on, (512, HIDDEN), jnp.bfloat16, "x")
    weights = sharded(on, (num_layers, HIDDEN, HIDDEN), jnp.bfloat16, None, "x")

    @jax.checkpoint
    def apply(x, w):
        return jax.nn.relu(matmul(x, w)), None

    def step(weights, x):
        loss = lambda weights: jax.lax.scan(apply, x, weights)[0].astype(jnp.float32).mean()
        return weights - jax.grad(loss)(weights)

    compiled = jax.jit(step).lower(weights, x).compile(UNOPTIMISED)
    # Forward; again before the backward pass; transposed in it.
    gathers = ["all-gather f32[4,4]"] * 3 + ["all-gather f8e4m3fn[512,512]"] * 3
    assert collectives(compiled) == [*gathers, "reduce-scatter f32[128,512]"]
    assert collectives_outside_loops(compiled) == []
