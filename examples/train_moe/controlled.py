"""The package's modules of Flax NNX with a control in place of their recipe."""

from functools import partial

import controls
import jax
import jax.numpy as jnp

from jax_fp8gemm import moe
from jax_fp8gemm import nnx as fp8


def mlp(control: controls.Control, x, w_gate_up, w_down, sizes):
    """Returns (silu(x gate) * (x up)) down of rows (m, d), by group where sizes are given."""
    gate, up = jnp.split(controls.product(control, x, w_gate_up.astype(x.dtype), sizes), 2, axis=-1)
    gate, up = (v.astype(jnp.float32) for v in (gate, up))
    hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
    return controls.product(control, hidden, w_down.astype(x.dtype), sizes)


class SwiGLU(fp8.SwiGLU):
    """The package's SwiGLU with a control in place of its recipe.

    Args:
      control: how operands are rounded; the others: as for the package's.
    """

    def __init__(self, hidden, intermediate, control: controls.Control, **options):
        super().__init__(hidden, intermediate, **options)
        self.control = control

    def __call__(self, x):
        rows = x.reshape(-1, x.shape[-1])
        out = mlp(self.control, rows, self.w_gate_up[...], self.w_down[...], None)
        return out.reshape(x.shape)


class MoE(fp8.MoE):
    """The package's MoE on one device with a control in place of its recipe.

    Args:
      control: how operands are rounded; the others: as for the package's.
    """

    def __init__(self, config, control: controls.Control, **options):
        super().__init__(config, **options)
        self.control = control

    def __call__(self, x, *, return_load):
        rows = x.astype(self.dtype).reshape(-1, x.shape[-1])
        router = self.router[...]
        logits = jnp.matmul(rows.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
        how = dict(bias=self.balance_bias[...], return_load=True)
        indices, weights, load = moe.route(logits, **self.config.routing, **how)
        sorted_rows, sizes, order = moe.permute(rows, indices, self.config.num_experts)
        run = partial(mlp, self.control)
        out = run(sorted_rows, self.w_gate_up[...], self.w_down[...], sizes)
        out = moe.unpermute(out, order, weights)
        out = out + run(rows, self.shared_gate_up[...], self.shared_down[...], None)
        return out.reshape(x.shape), load
