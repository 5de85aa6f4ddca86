"""One training step: gradients of micro-batches added in f32, AdamW, and the balance of experts."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from controls import Control
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from model import DOCUMENT, VOCAB, LanguageModel, Size

from jax_fp8gemm import Recipe, master_weights, moe, stats
from jax_fp8gemm import nnx as fp8
from jax_fp8gemm.nnx import BalanceBias

WARM_UP = 0.1  # share of the steps in which the learning rate rises
# That of Switch Transformers. Without it all tokens choose the same experts for hundreds of steps,
# because the router moves faster than the biases do.
BALANCE_LOSS = 1e-2
BALANCE_RATES = 1e-2, 1e-3  # of the biases: in the first step, and after the warm-up
BALANCED = 0.9  # share of the steps after which the biases stay, as at the end of DeepSeek-V3's


class State(NamedTuple):
    """What a checkpoint holds beside the step: every array that a step changes."""

    params: Any
    biases: Any
    optimizer: Any


class Program:
    """A model with a recipe on a mesh, and its compiled functions.

    Args:
      size: sizes of the model.
      recipe: of all products but the router's and the head's.
      steps: of the whole run, for the schedule of the learning rate.
      micro_batches: parts of a batch, one after another; their gradients are added in f32.
      mesh: None, or a mesh with the axes "fsdp" and "expert".
      quantizes_once: whether weights are quantised before the parts, not in each. No bit differs.
    """

    def __init__(
        self,
        size: Size,
        recipe,
        steps: int,
        micro_batches: int,
        mesh=None,
        quantizes_once: bool = True,
    ):
        self.mesh, self.micro_batches, self.light = mesh, micro_batches, size.light
        self.num_devices = 1 if mesh is None else mesh.size
        self.quantizes_once = quantizes_once and isinstance(recipe, Recipe)  # not a control
        one = SingleDeviceSharding(jax.devices()[0])
        self.axes = one if mesh is None else NamedSharding(mesh, P(("fsdp", "expert")))
        model = lambda key: nnx.split(
            LanguageModel(size, recipe, mesh, nnx.Rngs(key)), nnx.Param, BalanceBias
        )
        self.graph = nnx.eval_shape(lambda: LanguageModel(size, recipe, mesh, nnx.Rngs(0)))
        self.graph = nnx.split(self.graph, nnx.Param, BalanceBias)[0]
        warm_up = max(1, round(WARM_UP * steps))
        # To zero: with a rate left, the last losses have the noise of the last batches.
        rate = optax.warmup_cosine_decay_schedule(0, size.rate, warm_up, steps)
        balance = optax.linear_schedule(*BALANCE_RATES, warm_up)
        balanced = round(BALANCED * steps)
        self.rates = lambda step: (rate(step), jnp.where(step < balanced, balance(step), 0.0))
        is_matrix = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
        # Gradients of what only light tokens move are as small as their loss.
        least = 1e-8 * (size.light or 1)
        adam = optax.adamw(rate, b2=0.95, eps=least, weight_decay=0.1, mask=is_matrix)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)

        def start(key):
            _, params, biases = model(key)
            params, biases = nnx.to_pure_dict(params), nnx.to_pure_dict(biases)
            params = self.move(params, key)
            return State(params, biases, self.optimizer.init(params))

        jitter = recipe.jitter if isinstance(recipe, Control) else 0.0
        self.move = jax.jit(functools.partial(_moved, jitter))
        self.shapes = jax.eval_shape(start, jax.random.key(0))
        shardings = _shardings(self.shapes, mesh)
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        self.shapes = jax.tree.map(place, self.shapes, shardings)
        self.start = jax.jit(start, out_shardings=shardings)
        step = jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))
        batch = jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.int32, sharding=self.axes)
        # Compiled here, so that the first step takes as long as the others.
        number = jax.ShapeDtypeStruct((), jnp.int32)
        self.step = step.lower(self.shapes, batch, number).compile()
        self.evaluate = jax.jit(lambda state, tokens: self._loss(state.params, state, tokens)[1][0])
        # Of one part of a batch: the whole one may not fit.
        self._measured = stats.collect(
            lambda state, tokens: self._gradient(
                self._weights(state), state, tokens[:: self.micro_batches]
            )
        )

    def place(self, tokens):
        """Returns a batch on the devices, its sequences over all of them."""
        return jax.device_put(tokens, self.axes)

    def peak_bytes(self) -> int:
        """Returns the bytes of a device that a step holds at once, as XLA planned them."""
        plan = self.step.memory_analysis()
        held = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
        return held - plan.alias_size_in_bytes

    def measure(self, state: State, tokens) -> stats.Stats:
        """Returns what became of the operands that the gradient of a batch quantises, by module.

        Of a batch in several parts it is that of the first part.
        """
        return self._measured(state, tokens)[1]

    def _loss(self, params, state: State, tokens):
        pure = nnx.merge(self.graph, nnx.State(params), nnx.State(state.biases))
        given, following = tokens[:, :-1], tokens[:, 1:]
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        if not self.light:
            logits, loads, balance = pure(given)
            loss = trained = cross_entropy(logits, following).mean()
        else:
            is_light, counts = _documents(given.shape[1], self.light)
            logits, loads, balance = pure(given + VOCAB * is_light)
            own = jnp.where(is_light[:, None], logits[..., VOCAB:], logits[..., :VOCAB])
            losses = cross_entropy(own, following)
            loss = jnp.mean(losses, where=counts > 0)
            trained = jnp.mean(losses * counts, where=counts > 0)
        return trained + BALANCE_LOSS * balance, (loss, loads)

    def _weights(self, state: State):
        """Returns what products read: the parameters, or what is quantised of them once."""
        if not self.quantizes_once:
            return state.params
        model = nnx.merge(self.graph, nnx.State(state.params), nnx.State(state.biases))
        fp8.quantize_weights(model)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def _gradient(self, weights, state: State, tokens):
        """Returns (loss with that of balance, (loss, loads)), and gradients of the parameters."""
        losses, gradients = jax.value_and_grad(self._loss, has_aux=True)(weights, state, tokens)
        # Those of a kernel that was cast to bf16 before it was quantised are bf16.
        as_params = lambda g, w: g.astype(w.dtype)
        return losses, jax.tree.map(as_params, master_weights(gradients), state.params)

    def _step(self, state: State, tokens, step):
        gradient = functools.partial(self._gradient, self._weights(state), state)

        def add(total, tokens):
            return jax.tree.map(jnp.add, total, gradient(tokens)), None

        # (micro_batches, batch / micro_batches, length + 1): a part has sequences of all devices.
        parts = tokens.reshape(-1, self.micro_batches, tokens.shape[1]).swapaxes(0, 1)
        if self.micro_batches == 1:
            sums = gradient(tokens)
        else:
            zeros = jax.eval_shape(gradient, parts[0])
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
            sums, _ = jax.lax.scan(add, zeros, parts)
        (_, (loss, loads)), gradients = sums
        loss, gradients = jax.tree.map(lambda x: x / self.micro_batches, (loss, gradients))
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        rate, balance_rate = self.rates(step)
        leaves, tree = jax.tree.flatten(state.biases)  # one for each layer with experts, in order
        biases = [
            moe.update_balance_bias(b, load, balance_rate)
            for b, load in zip(leaves, loads, strict=True)
        ]
        metrics = dict(
            loss=loss,
            rate=rate,
            grad_norm=optax.tree.norm(gradients),
            # 1: every expert has as many tokens as the others.
            max_load=jnp.max(loads / jnp.mean(loads, axis=1, keepdims=True)),
        )
        params = optax.apply_updates(state.params, updates)
        return State(params, jax.tree.unflatten(tree, biases), optimizer), metrics


def _documents(length: int, light: float):
    """Returns which of `length` tokens are light, and how much the loss of each counts.

    The byte behind a document's last one belongs to another document, and is not told.
    """
    place = np.arange(length)
    is_light = place // DOCUMENT % 2 == 1
    counts = np.where(is_light, light, 1.0)
    return is_light, np.where(place % DOCUMENT == DOCUMENT - 1, 0.0, counts)


def _moved(share: float, params, key):
    """Returns each value moved at random by up to a share of itself."""
    if share == 0:
        return params
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
    move = lambda x, key: x * (1 + share * jax.random.uniform(key, x.shape, minval=-1.0))
    return jax.tree.unflatten(tree, map(move, leaves, keys))


def _shardings(tree, mesh):
    """Returns where each array lies: experts along "expert", other dimensions along "fsdp".

    Both cut at multiples of 128 only, so that no scale block is cut.
    """

    def of(x):
        if mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        spec = [None] * x.ndim
        if x.ndim == 3:
            spec[0] = "expert"
        for dim in range(max(0, x.ndim - 2), x.ndim if x.ndim > 1 else 0):
            if x.shape[dim] % (128 * mesh.shape["fsdp"]) == 0:
                spec[dim] = "fsdp"
                break
        return NamedSharding(mesh, P(*spec))

    return jax.tree.map(of, tree)


@functools.cache
def program(*args) -> Program:
    """Returns the program of the same arguments again: what it compiled stays."""
    return Program(*args)
