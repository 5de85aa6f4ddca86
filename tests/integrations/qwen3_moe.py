"""A model of the shape of Qwen3-MoE in plain NNX, as one writes it without this package.

The published ones are in packages with hundreds of megabytes of dependencies. From the model's
report: RMSNorm of each head's query and key, grouped-query attention, softmax of all router logits
before top-k, weights of the chosen normalised, SwiGLU experts without a shared one.
"""

import jax
import jax.numpy as jnp
from flax import nnx

DTYPE = jnp.bfloat16


class Attention(nnx.Module):
    def __init__(self, dim, heads, kv_heads, head_dim, rngs):
        linear = lambda shape: nnx.LinearGeneral(dim, shape, use_bias=False, dtype=DTYPE, rngs=rngs)
        self.q, self.k, self.v = map(linear, [(heads, head_dim), *[(kv_heads, head_dim)] * 2])
        self.q_norm, self.k_norm = (nnx.RMSNorm(head_dim, dtype=DTYPE, rngs=rngs) for _ in range(2))
        self.out = nnx.LinearGeneral(
            (heads, head_dim), dim, axis=(-2, -1), use_bias=False, dtype=DTYPE, rngs=rngs
        )

    def __call__(self, x):
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class Experts(nnx.Module):
    def __init__(self, dim, hidden, num_experts, top_k, rngs):
        self.top_k = top_k
        self.router = nnx.Linear(dim, num_experts, use_bias=False, dtype=jnp.float32, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        weights = lambda *shape: nnx.Param(init(rngs.params(), (num_experts, *shape)))
        self.gate, self.up = weights(dim, hidden), weights(dim, hidden)
        self.down = weights(hidden, dim)

    def __call__(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        probabilities = jax.nn.softmax(self.router(tokens.astype(jnp.float32)))
        weights, experts = jax.lax.top_k(probabilities, self.top_k)
        weights = weights / weights.sum(-1, keepdims=True)
        order = jnp.argsort(experts.ravel())
        sizes = jnp.bincount(experts.ravel(), length=probabilities.shape[1])
        rows = tokens[order // self.top_k]
        of = lambda weight: weight.get_value().astype(DTYPE)
        gate = jax.lax.ragged_dot(rows, of(self.gate), sizes)
        hidden = jax.nn.silu(gate) * jax.lax.ragged_dot(rows, of(self.up), sizes)
        rows = jax.lax.ragged_dot(hidden, of(self.down), sizes)
        choices = jnp.zeros_like(rows).at[order].set(rows).reshape(*experts.shape, -1)
        return (choices * weights[..., None].astype(DTYPE)).sum(1).reshape(x.shape)


class Qwen3Moe(nnx.Module):
    def __init__(self, vocabulary, dim, num_layers, rngs):
        self.embed = nnx.Embed(vocabulary, dim, dtype=DTYPE, rngs=rngs)
        norms = lambda count: nnx.List(
            nnx.RMSNorm(dim, dtype=DTYPE, rngs=rngs) for _ in range(count)
        )
        self.attention_norms, self.expert_norms = norms(num_layers), norms(num_layers)
        self.attentions = nnx.List(Attention(dim, 4, 2, 16, rngs) for _ in range(num_layers))
        self.experts = nnx.List(Experts(dim, 48, 8, 2, rngs) for _ in range(num_layers))
        self.norm = nnx.RMSNorm(dim, dtype=DTYPE, rngs=rngs)
        self.head = nnx.Linear(dim, vocabulary, use_bias=False, dtype=DTYPE, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for i in range(len(self.attentions)):
            x = x + self.attentions[i](self.attention_norms[i](x))
            x = x + self.experts[i](self.expert_norms[i](x))
        return self.head(self.norm(x))
