"""The family `expert-parallel`: a mixture of experts spread over the GPUs, forward and backward.

Each GPU has its own tokens and its own experts. Routing counts, and so does the exchange of tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.case import Build, Case
from benchmarks.families.exchanges import (
    Mode,
    exchange_call,
    make,
    parse_mode,
    received_rows,
    row_bytes,
)
from benchmarks.families.mesh import AXIS, Options, local_mesh, step_call
from benchmarks.problem import Shape, Work
from benchmarks.timing.timer import Call
from jax_fp8gemm import BF16, Recipe, moe
from jax_fp8gemm.moe._parallel.exchange import NAMES
from jax_fp8gemm.moe._parallel.parts import NumParts

# As the command line names them.
PARTS: Mapping[str, NumParts | None] = {"1": 1, "2": 2, "4": 4, "chosen": None}

_LAX_REPEAT = 1  # three steps, of half a second or more each
# Without CUDA graphs. The host updates a graph, 0.2 ms, before the GPU goes on where it has waited
# to know which branch is taken.
_NO_GRAPHS: Options = {"xla_gpu_enable_command_buffer": ""}
_COPY_ENGINES: Options = {"xla_gpu_use_memcpy_local_p2p": True}
# Of jax.lax.ragged_dot's layer, whose time and memory grow with the rows that it has room for: as
# many as ours computes in a turn. Evenly spread choices do not reach it, so none is dropped.
_LAX_CAPACITY = 1.25
_FP8_COMBINE = Recipe(fp8_combine=True)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Of each GPU: x (tokens, hidden), w_gate_up (experts, hidden, 2 inter), w_down."""

    name: str
    experts: int
    tokens: int
    top_k: int
    hidden: int
    inter: int

    @property
    def flop(self) -> int:
        """Of one GPU: three products, forward and two backward."""
        return 18 * self.tokens * self.top_k * self.hidden * self.inter


DEEPSEEK_V3 = Mixture("deepseek_v3", experts=16, tokens=8192, top_k=8, hidden=7168, inter=2048)


def expert_parallel_cases(
    mixture: Mixture,
    parts: Sequence[str] = ("1",),
    modes: Sequence[Mode] = tuple(map(parse_mode, NAMES)),
) -> list[Case]:
    """Our layer in each mode beside one GPU alone, and once in bf16. Figures are of one GPU.

    Also once beside ours whose results travel back in FP8, beside ours with copy engines, and
    beside all GPUs each with a layer of its own. Last come rows of the forward pass alone, in one
    part.

    parts: keys of PARTS, with each of which the layer is measured.
    """
    m, mesh = mixture, local_mesh()
    # Read once: x, dout, both weights. Written once: the result, dx, both gradients. All but
    # logits, a thousandth of that.
    num_bytes = 2 * (4 * m.tokens * m.hidden + 6 * m.experts * m.hidden * m.inter)
    # Compiled once for all rows.
    one_gpu = functools.cache(lambda: expert_parallel_call(mixture, _first_of(mesh)))
    one_gpu_forward = functools.cache(
        lambda: expert_parallel_call(mixture, _first_of(mesh), is_forward=True)
    )

    def variants(build: Callable[..., Call], is_forward: bool) -> dict[str, Build]:
        """Others of all GPUs, beside the row of all_gather."""
        every = functools.partial(expert_parallel_call, mixture, mesh, is_forward=is_forward)
        return {
            "every_gpu": functools.partial(every, is_on_every_gpu=True),
            "fp8_combine": functools.partial(build, recipe=_FP8_COMBINE),
            "copy_engines": functools.partial(build, compiler_options=_COPY_ENGINES),
        }

    def case(mode: Mode, num_parts: str) -> Case:
        def build(**more: Any) -> Call:
            with mode.applied():
                how: dict[str, Any] = dict(parts=PARTS[num_parts]) | mode.options() | more
                return expert_parallel_call(mixture, mode.mesh(mesh), **how)

        peers: dict[str, Build] = {"one_gpu": one_gpu}
        if mode.text == "all_gather" and num_parts == parts[0]:
            peers |= variants(build, is_forward=False)
            peers["lax_ragged_dot"] = functools.partial(
                expert_parallel_call,
                mixture,
                mesh,
                **mode.options(),
                recipe=BF16,
                capacity_factor=_LAX_CAPACITY,
                max_repeat=_LAX_REPEAT,
            )
        how = Work(m.flop, num_bytes), build, peers, PARTS[num_parts] or num_parts
        return _case(mixture, m.name, mode, mesh, *how)

    def forward_case(mode: Mode) -> Case:
        def build(**more: Any) -> Call:
            with mode.applied():
                how: dict[str, Any] = dict(is_forward=True) | mode.options() | more
                return expert_parallel_call(mixture, mode.mesh(mesh), **how)

        peers: dict[str, Build] = {"one_gpu": one_gpu_forward}
        if mode.text == "all_gather":
            peers |= variants(build, is_forward=True)
        # Read once: x and both weights. Written once: the result.
        work = Work(m.flop // 3, 2 * (2 * m.tokens * m.hidden + 3 * m.experts * m.hidden * m.inter))
        return _case(mixture, f"{m.name}_forward", mode, mesh, work, build, peers, 1)

    steps = [case(mode, num_parts) for mode in modes for num_parts in parts]
    return [*steps, *map(forward_case, modes)]


def exchange_cases(mixture: Mixture, modes: Sequence[Mode]) -> list[Case]:
    """The exchange of a forward pass alone. The bytes are what one GPU gets from others."""
    m, mesh = mixture, local_mesh()

    def case(mode: Mode) -> Case:
        exchange = make(mode, mode.mesh(mesh).devices.shape, m.tokens, m.top_k)
        num_bytes = round(received_rows(exchange) * row_bytes(m.hidden, m.top_k))
        sizes = m.tokens, m.top_k, m.hidden, m.experts
        build = functools.partial(exchange_call, mesh, mode, *sizes)
        return _case(mixture, f"{m.name}_exchange", mode, mesh, Work(0, num_bytes), build, {})

    return [case(mode) for mode in modes]


def _case(
    mixture: Mixture,
    name: str,
    mode: Mode,
    mesh: Mesh,
    work: Work,
    build: Build,
    peers: dict[str, Build],
    parts: int | str | None = None,
) -> Case:
    m = mixture
    labels = dict(
        name=name,
        gpus=mesh.size,
        experts=m.experts,
        tokens=m.tokens,
        top_k=m.top_k,
        hidden=m.hidden,
        inter=m.inter,
        mode=mode.text,
        **({} if parts is None else {"parts": parts}),
    )
    shape = Shape(m.tokens, m.inter, m.hidden)
    return Case(labels, shape, work, config="", build=build, peers=peers)


def expert_parallel_call(
    mixture: Mixture,
    mesh: Mesh,
    max_repeat: int | None = None,
    is_forward: bool = False,
    is_on_every_gpu: bool = False,
    compiler_options: Options = MappingProxyType({}),
    **options: Any,
) -> Call:
    """The compiled forward and backward on random bf16 inputs that lie on `mesh`.

    is_forward: whether the backward pass is left out.
    is_on_every_gpu: whether each GPU runs the layer of one, with its tokens and its experts.
    compiler_options: of XLA, beside those of all layers.
    options: of moe_layer.
    """
    if "expert_axis" in options:
        options["mesh"] = mesh
    layer = functools.partial(moe.moe_layer, top_k=mixture.top_k, **options)
    if is_on_every_gpu:
        layer = _on_every_gpu(layer, mesh, mixture.experts)
    step = functools.partial(_forward if is_forward else _forward_backward, layer)
    how: Any = dict(max_repeat=max_repeat, options={**_NO_GRAPHS, **compiler_options})
    return step_call(step, None, *_operands(mixture, mesh), **how)


def _on_every_gpu(
    layer: Callable[..., jax.Array], mesh: Mesh, num_experts: int
) -> Callable[..., jax.Array]:
    """The layer of one GPU, on each GPU. Its logits are the first num_experts of a token."""

    def run(x: jax.Array, logits: jax.Array, *weights: jax.Array) -> jax.Array:
        return layer(x, logits[:, :num_experts], *weights)

    spec = P(mesh.axis_names)
    return jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)


def _forward(
    layer: Callable[..., jax.Array], state: None, *operands: jax.Array
) -> tuple[None, jax.Array]:
    """No state; and the result."""
    *inputs, _ = operands
    return state, layer(*inputs)


def _forward_backward(
    layer: Callable[..., jax.Array],
    state: None,
    x: jax.Array,
    logits: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    dout: jax.Array,
) -> Any:
    """No state; and the result and four gradients."""
    out, pullback = jax.vjp(layer, x, logits, w_gate_up, w_down)
    return state, (out, *pullback(dout))


def _first_of(mesh: Mesh) -> Mesh:
    return jax.make_mesh((1,), (AXIS,), axis_types=(AxisType.Auto,), devices=[mesh.devices.flat[0]])


def _operands(mixture: Mixture, mesh: Mesh) -> tuple[jax.Array, ...]:
    """x, logits, w_gate_up, w_down and dout, each made where it lives."""
    m = mixture
    tokens, experts = m.tokens * mesh.size, m.experts * mesh.size
    # Weights of variance 1/fan-in, as at initialisation: activations stay near 1.
    arrays = (
        ((tokens, m.hidden), jnp.bfloat16, 1.0),
        ((tokens, experts), jnp.float32, 1.0),
        ((experts, m.hidden, 2 * m.inter), jnp.bfloat16, m.hidden**-0.5),
        ((experts, m.inter, m.hidden), jnp.bfloat16, m.inter**-0.5),
        ((tokens, m.hidden), jnp.bfloat16, 1.0),
    )

    def make() -> tuple[jax.Array, ...]:
        return tuple(
            jax.random.normal(jax.random.key(i), shape, dtype) * scale
            for i, (shape, dtype, scale) in enumerate(arrays)
        )

    return jax.jit(make, out_shardings=NamedSharding(mesh, P(mesh.axis_names)))()
