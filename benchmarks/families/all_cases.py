"""Families by name, and the cases of each."""

from collections.abc import Sequence

from benchmarks.case import Case
from benchmarks.families import decode, exchanges, expert_parallel, fsdp, mlp, moe, step
from benchmarks.families.activation import activation_cases
from benchmarks.families.grouped import grouped_cases
from benchmarks.families.mesh import local_mesh
from benchmarks.families.products import cases
from benchmarks.families.square_wgrad import square_wgrad_cases
from benchmarks.problem import GroupedShape, Shape

GROUPED = ("ragged", "masked", "ragged-wgrad")
SQUARE_WGRAD = ("wgrad-square", "ragged-wgrad-square")
TILED = ("dense", "wgrad", *GROUPED, *SQUARE_WGRAD)
# Many kernels a call, all of which count.
LAYERS_OF_KERNELS = ("matmul", "decode", "moe", "step", "model")
MESH = ("fsdp", "expert-parallel")  # on all GPUs
FAMILIES = (*TILED, "quantize", "activation", *LAYERS_OF_KERNELS, *MESH, "host")


def exchange_rows(texts: Sequence[str], parts: Sequence[str]) -> Sequence[Case]:
    """The cases of `expert-parallel --exchange`: each exchange alone, and in the layer."""
    modes = exchanges.modes_of(texts, local_mesh().size)
    mixture = expert_parallel.DEEPSEEK_V3
    alone = expert_parallel.exchange_cases(mixture, modes)
    return [*alone, *expert_parallel.expert_parallel_cases(mixture, parts, modes)]


def cases_of(
    family: str, shapes: Sequence[Shape] = (), parts: Sequence[str] = ("1",)
) -> Sequence[Case]:
    """The cases of a family, of these shapes where it has none of its own.

    parts: of expert-parallel, of expert_parallel.PARTS.
    """
    if family == "matmul":
        return [mlp.mlp_case(mlp.LLAMA3_8B)]
    if family == "decode":
        return decode.decode_cases(decode.LLAMA3_8B)
    if family == "moe":
        return [moe.moe_case(layer) for layer in moe.LAYERS]
    if family == "step":
        return [step.step_case(block) for block in step.BLOCKS]
    if family == "model":
        from benchmarks.families import model  # no other family needs Flax and optax

        return model.model_cases(model.LLAMA3_8B)
    if family == "fsdp":
        return [fsdp.fsdp_case(stack) for stack in fsdp.STACKS]
    if family == "expert-parallel":
        return expert_parallel.expert_parallel_cases(expert_parallel.DEEPSEEK_V3, parts)
    if family == "activation":
        return activation_cases(shapes)
    if family in SQUARE_WGRAD:
        return square_wgrad_cases(shapes)
    name = family.replace("-", "_")
    if family in GROUPED:
        return grouped_cases(name, [s for s in shapes if isinstance(s, GroupedShape)])
    return cases(name, shapes)
