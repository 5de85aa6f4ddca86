"""Experts: their published names, and the two stacks that moe_layer takes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from jax_fp8gemm._data.formats import SCALE_BLOCK
from jax_fp8gemm.checkpoint._sources import Source, Stack
from jax_fp8gemm.checkpoint._stored import refuse
from jax_fp8gemm.checkpoint._weights import Weight

# gate, up, down: of DeepSeek-V3, Kimi K2 and Qwen3; of DeepSeek-V4.
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_STACK = re.compile(r"(.*\bexperts)\.(w_gate_up|w_down)")
_SEPARATE = "stack_experts=False loads each expert's weights by themselves."

Names = tuple[tuple[str, ...], ...]


def published_names(stack: str, num_experts: int) -> Names:
    """Returns DeepSeek-V3's names of the weights of a stack. Raises ValueError if it is none."""
    match = _STACK.fullmatch(stack)
    if match is None:
        raise ValueError(
            "checkpoint.save: a ScaledArray of three dimensions must be named "
            f'"<layer>.experts.w_gate_up" or "<layer>.experts.w_down"; got "{stack}"'
        )
    gate, up, down = _PROJECTIONS[0]
    parts = (gate, up) if match[2] == "w_gate_up" else (down,)
    return tuple(
        tuple(f"{match[1]}.{i}.{part}.weight" for part in parts) for i in range(num_experts)
    )


def stack_experts(weights: Mapping[str, Weight]) -> tuple[dict[str, Weight], dict[str, Names]]:
    """Returns the weights with quantised experts stacked, and the names of each stack's weights."""
    layers: defaultdict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for name in weights:
        match = _EXPERT.fullmatch(name)
        is_matrix = len(weights[name].values.shape) == 2
        if match is not None and is_matrix and weights[name].scale is not None:
            layers[match[1]][int(match[2]), match[3]] = name
    stacks: dict[str, Names] = {}
    for layer, names in layers.items():
        gate, up, down = _projections(layer, names)
        experts = range(1 + max(i for i, _ in names))
        for i in experts:
            for part in (gate, up, down):
                if (i, part) not in names:
                    got = f"no quantised {layer}.{i}.{part}.weight among the weights to load"
                    refuse(f"the experts 0..{experts[-1]} of a stack must be whole", got, _SEPARATE)
        stacks[f"{layer}.w_gate_up"] = tuple((names[i, gate], names[i, up]) for i in experts)
        stacks[f"{layer}.w_down"] = tuple((names[i, down],) for i in experts)
        _check_shapes(weights, stacks[f"{layer}.w_gate_up"], stacks[f"{layer}.w_down"])
    stacked = {name for rows in stacks.values() for row in rows for name in row}
    result = {name: weight for name, weight in weights.items() if name not in stacked}
    for stack, names in stacks.items():
        if stack in result:
            refuse("the name of a stack must be free", f"a tensor {stack}", _SEPARATE)
        result[stack] = _stack(weights, names)
    return result, stacks


def _projections(layer: str, names: Mapping[tuple[int, str], str]) -> tuple[str, str, str]:
    present = {part for _, part in names}
    for parts in _PROJECTIONS:
        if present <= set(parts):
            return parts
    refuse("a layer's experts must have names of one kind", f"{sorted(present)} in {layer}")


def _check_shapes(weights: Mapping[str, Weight], gate_up: Names, down: Names) -> None:
    """Raises ValueError unless all experts have gate (f, d), up (f, d) and down (d, f)."""
    f, d = weights[gate_up[0][0]].values.shape
    for (gate, up), (last,) in zip(gate_up, down, strict=True):
        for name, shape in ((gate, (f, d)), (up, (f, d)), (last, (d, f))):
            found = weights[name].values
            if found.shape != shape or found.dtype != weights[gate].values.dtype:
                got = f"{found.dtype.name}{list(found.shape)} for {name}"
                refuse(f"it must be {list(shape)}, as the first expert's, to stack", got, _SEPARATE)
    if f % SCALE_BLOCK:
        must = f"f must be a multiple of {SCALE_BLOCK} to stack gate and up without quantising anew"
        refuse(must, f"f={f} in {gate_up[0][0]}", _SEPARATE)


def _stack(weights: Mapping[str, Weight], names: Names) -> Weight:
    def scale(name: str) -> Source:
        source = weights[name].scale
        if source is None:
            raise AssertionError(f"{name} is not quantised")
        return source

    values = tuple(tuple(weights[name].values for name in row) for row in names)
    return Weight(Stack(values), Stack(tuple(tuple(map(scale, row)) for row in names)))
