"""Trains one mixture-of-experts layer twice, in bf16 and in FP8, and prints both losses.

The data are synthetic: tokens of several clusters, each with a linear map of its own to targets,
so that experts are worth having. The two layers differ in one argument, the recipe.

    python examples/moe_layer.py [--steps N] [--tokens N] [--dim N] [--experts N]
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax

import jax_fp8gemm
from jax_fp8gemm.moe import moe_layer

TOP_K = 2


def make_params(key, dim, num_experts):
    """The router, and experts of half the layer's width."""
    keys = jax.random.split(key, 3)
    normal = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
    return {
        "router": normal(keys[0], dim, num_experts),
        "w_gate_up": normal(keys[1], num_experts, dim, dim),
        "w_down": normal(keys[2], num_experts, dim // 2, dim),
    }


def draw(key, clusters, num_tokens):
    """Tokens around the centres of their clusters, and what the clusters' maps make of them."""
    centres, maps = clusters
    which, noise = jax.random.split(key)
    cluster = jax.random.randint(which, (num_tokens,), 0, len(centres))
    x = centres[cluster] + jax.random.normal(noise, (num_tokens, centres.shape[1]))
    return x.astype(jnp.bfloat16), jnp.einsum("td,tdf->tf", x, maps[cluster])


def loss_fn(params, x, target, recipe):
    logits = x.astype(jnp.float32) @ params["router"]  # the router stays in f32
    experts = params["w_gate_up"], params["w_down"]
    out = moe_layer(x, logits, *experts, top_k=TOP_K, recipe=recipe)
    return jnp.mean((out.astype(jnp.float32) - target) ** 2) / jnp.mean(target**2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 100), ("tokens", 512), ("dim", 128), ("experts", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if min(vars(args).values()) < 1 or args.experts < TOP_K or args.dim % 2:
        what = f"numbers must be positive, --dim even and --experts at least {TOP_K}"
        parser.error(f"{what}; got {args}")
    print(jax_fp8gemm.backend_info(), end="\n\n")
    keys = jax.random.split(jax.random.key(0), 3)
    centres = jax.random.normal(keys[0], (args.experts // 2, args.dim))
    maps = jax.random.normal(keys[1], (*centres.shape, args.dim)) * args.dim**-0.5
    params = make_params(keys[2], args.dim, args.experts)
    optimizer = optax.adam(3e-3)

    @functools.partial(jax.jit, static_argnames="recipe")
    def train_step(params, state, key, recipe):
        x, target = draw(key, (centres, maps), args.tokens)
        loss, gradients = jax.value_and_grad(loss_fn)(params, x, target, recipe)
        updates, state = optimizer.update(gradients, state)
        return loss, (optax.apply_updates(params, updates), state)

    recipes = jax_fp8gemm.BF16, jax_fp8gemm.DEEPSEEK_V3
    runs = dict.fromkeys(recipes, (params, optimizer.init(params)))
    print(f"{'step':>6}{'bf16 loss':>12}{'fp8 loss':>12}")
    for step in range(1, args.steps + 1):
        losses = {}
        for recipe in recipes:
            losses[recipe], runs[recipe] = train_step(*runs[recipe], jax.random.key(step), recipe)
        if step % max(1, args.steps // 10) == 0:
            print(f"{step:6}" + "".join(f"{losses[recipe]:12.4f}" for recipe in recipes))


if __name__ == "__main__":
    main()
