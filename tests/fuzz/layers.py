"""Random mixtures of experts: the result and every gradient beside the same layer in plain f32 JAX.

A gradient that vanishes, one with a wrong factor and one that is computed without FP8 are outside
of the bounds. Layers run on one device, or over four where there are as many.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jax_fp8gemm as fp8
from jax_fp8gemm import moe

TOKENS, EXPERTS, D, F = 128, 8, 128, 128
# Relative errors in the 2-norm. Of three rounded products that follow each other, two operands with
# 2.6 % each: 4 to 8 %, and more where what travels back is rounded too or bwd has two bits.
PRODUCTS, COARSE = (0.02, 0.12), (0.02, 0.2)
EXACT = (0.0, 0.02)  # bf16
ROUTER = (0.0, 0.4)  # of differences between the results of experts
SUMS = (0.0, 0.12)  # of biases: cotangents are added unquantised


def random_layer(rng: np.random.Generator) -> tuple[str, str | None]:
    """Returns what a layer is, and what is wrong with it."""
    how, operands, recipe = _random_arguments(rng)
    text = f"moe_layer {dict(how)} {recipe} {sorted(operands)} {operands['x'].dtype}"
    dout = jnp.asarray(rng.standard_normal((TOKENS, D)), jnp.float32)
    found = _value_and_gradients(functools.partial(_ours, how, recipe), operands, dout)
    wide = {name: x.astype(jnp.float32) for name, x in operands.items()}
    expected = _value_and_gradients(functools.partial(_plain, how), wide, dout)
    faults = (
        f"{name} has an error of {error:.3f}, expected {bounds}"
        for name, bounds in _bounds(how, recipe, operands).items()
        if not bounds[0] <= (error := _error(found[name], expected[name])) <= bounds[1]
    )
    return text, next(faults, None)


def _random_arguments(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any], Any]:
    choose = lambda *values: values[rng.integers(len(values))]
    how: dict[str, Any] = dict(
        top_k=choose(2, 3, 4),
        scoring=choose("softmax", "sigmoid", "sqrtsoftplus"),
        normalize=choose(True, True, False),
        scale=choose(1.0, 2.5),
        activation=choose("silu", "silu", "gelu", "relu2"),
    )
    is_parallel = jax.device_count() >= 4 and choose(True, False)
    recipe = choose(
        fp8.DEEPSEEK_V3,
        fp8.HYBRID,
        fp8.BF16,
        fp8.Recipe(wgrad="bf16"),
        fp8.Recipe(batch_invariant=True),
        fp8.Recipe(batch_invariant=True, pow2_scale=True, kept_gate_up="fp8"),
        fp8.Recipe(wgrad_lhs_block=(128, 128), kept_gate_up="fp8"),
        fp8.Recipe(fp8_combine=True),
    )
    if is_parallel:
        mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
        exchange, parts = choose("all_gather", "all_to_all"), choose(1, 2)
        how |= dict(expert_axis="expert", mesh=mesh, exchange=exchange, parts=parts)
    dtypes = choose(jnp.bfloat16, jnp.float32), choose(jnp.bfloat16, jnp.float32)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    operands = dict(
        x=normal(TOKENS, D).astype(dtypes[0]),
        logits=normal(TOKENS, EXPERTS).astype(dtypes[1]),
        w_gate_up=normal(EXPERTS, D, 2 * F) / D**0.5,
        w_down=normal(EXPERTS, F, D) / F**0.5,
    )
    if choose(True, False):
        operands |= dict(b_gate_up=normal(EXPERTS, 2 * F) / 4, b_down=normal(EXPERTS, D) / 4)
    if choose(True, False):
        operands |= dict(
            shared_gate_up=normal(D, 2 * F) / D**0.5, shared_down=normal(F, D) / F**0.5
        )
    if choose(True, False):
        how["bias"] = normal(EXPERTS) / 20
    return how, operands, recipe


def _value_and_gradients(layer, operands, dout) -> dict[str, Any]:
    def loss(operands):
        out = layer(operands)
        return jnp.sum(out.astype(jnp.float32) * dout), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))(operands)
    return dict(gradients, out=out)


def _ours(how, recipe, p):
    biases = (p["b_gate_up"], p["b_down"]) if "b_down" in p else None
    shared = (p["shared_gate_up"], p["shared_down"]) if "shared_down" in p else None
    router, weights = p["logits"], (p["w_gate_up"], p["w_down"])
    more: dict[str, Any] = dict(biases=biases, shared_expert=shared, implementation="xla")
    return moe.moe_layer(p["x"], router, *weights, recipe=recipe, **more, **how)


def _plain(how, p):
    """Every expert for every token, in f32, and none of the package."""
    logits, top_k = p["logits"], how["top_k"]
    if how["scoring"] == "softmax":
        scores = jax.nn.softmax(logits)
    elif how["scoring"] == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        scores = jnp.sqrt(jax.nn.softplus(logits))
    by = scores + how["bias"][None] if "bias" in how else logits
    indices = jax.lax.top_k(by, top_k)[1]
    chosen = jnp.take_along_axis(scores, indices, axis=1)
    if how["normalize"]:
        chosen = chosen / jnp.sum(chosen, axis=1, keepdims=True)
    is_of = jax.nn.one_hot(indices, EXPERTS) * (how["scale"] * chosen)[..., None]
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def gated(gate_up):
        gate, up = jnp.split(gate_up, 2, axis=-1)
        if how["activation"] == "relu2":
            return jnp.maximum(gate, 0) ** 2 * up
        if how["activation"] == "gelu":
            return jax.nn.gelu(gate, approximate=False) * up
        return jax.nn.silu(gate) * up

    bias_of = lambda name: p[name][None] if name in p else 0.0
    gate_up = einsum("td,edf->tef", p["x"], p["w_gate_up"]) + bias_of("b_gate_up")
    out = einsum("tef,efd->ted", gated(gate_up), p["w_down"]) + bias_of("b_down")
    out = einsum("tke,ted->td", is_of, out)
    if "shared_down" in p:
        out += einsum(
            "tf,fd->td", gated(einsum("td,df->tf", p["x"], p["shared_gate_up"])), p["shared_down"]
        )
    return out


def _bounds(how, recipe, operands) -> dict[str, tuple[float, float]]:
    if not recipe.is_fp8:
        return dict.fromkeys([*operands, "out"], EXACT) | dict(logits=(0.0, 0.05))
    is_coarse = recipe.bwd == "e5m2" or recipe.fp8_combine
    bounds = dict.fromkeys([*operands, "out"], COARSE if is_coarse else PRODUCTS)
    return (
        bounds | dict(logits=ROUTER) | {n: SUMS for n in ("b_gate_up", "b_down") if n in operands}
    )


def _error(found, expected) -> float:
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
