"""What XLA makes of our programs for two H100s, without a GPU. `make gpu-programs` runs these."""

import functools
import re

import gpu_topology
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8gemm
from benchmarks.case import peak_bytes
from benchmarks.families import expert_parallel, fsdp, hlo_text, mesh
from benchmarks.families.exchanges import parse_mode
from benchmarks.families.training import State
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call
from jax_fp8gemm import moe
from jax_fp8gemm.moe._parallel import strips

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the package jax-cuda13-plugin")

GB = 10**9
LAYER = expert_parallel.DEEPSEEK_V3
# Of the weights of a GPU: (experts, hidden, 2 inter), (experts, inter, hidden), and transposed.
WEIGHT_SHAPES = "16,7168,4096|16,4096,7168|16,2048,7168|16,7168,2048"


@pytest.fixture(scope="module", autouse=True)
def two_h100s():
    with pytest.MonkeyPatch.context() as patch:
        on = gpu_topology.mesh(mesh.AXIS)
        for module in (mesh, fsdp, expert_parallel):
            patch.setattr(module, "local_mesh", lambda: on)
        patch.setattr(fsdp, "step_call", planned)
        patch.setattr(fsdp, "_operands", stack_operands)
        patch.setattr(strips, "_MIN_STRIP_BYTES", 16 << 20)  # which more GPUs exceed
        yield


def compiled(step, state, *operands, options=None):
    """The program of a step, for arrays that are types alone."""
    options = gpu_topology.COMPILER_OPTIONS | dict(mesh._OPTIONS if options is None else options)
    jitted = jax.jit(step, donate_argnums=0)
    return jitted.lower(state, *operands).compile(compiler_options=options)


def planned(step, state, *operands, options):
    """As mesh.step_call, for types. It cannot run."""
    program = compiled(step, state, *operands, options={**mesh._OPTIONS, **options})
    return Call(lambda: None, jax_queue(), peak_bytes=peak_bytes(program))


def types(tree, spec):
    sharding = NamedSharding(mesh.local_mesh(), spec)
    of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(of, tree)


def stack_operands(stack):
    """As fsdp._operands, of types."""
    is_stacked = stack.loop != "unrolled"
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    layers = lambda shape: (
        bf16(stack.num_layers, *shape) if is_stacked else [bf16(*shape)] * stack.num_layers
    )
    weights = types(
        [layers(s) for s in stack.shapes], P(None, mesh.AXIS) if is_stacked else P(mesh.AXIS)
    )
    moments = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32, sharding=w.sharding), weights
    )
    step = types(jax.ShapeDtypeStruct((), jnp.int32), P())
    tokens = types(bf16(2 * stack.tokens, stack.hidden), P(mesh.AXIS))
    return State(weights, moments, moments, step), tokens, tokens


@functools.cache
def layer_program(is_forward, has_options=True):
    """The text of the expert-parallel layer's optimised HLO, with the exchange all_gather.

    has_options: whether XLA's options are those of the benchmarks, or its own.
    """
    tokens, experts = 2 * LAYER.tokens, 2 * LAYER.experts
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    operands = (
        bf16(tokens, LAYER.hidden),
        jax.ShapeDtypeStruct((tokens, experts), jnp.float32),
        bf16(experts, LAYER.hidden, 2 * LAYER.inter),
        bf16(experts, LAYER.inter, LAYER.hidden),
        bf16(tokens, LAYER.hidden),
    )
    how = dict(top_k=LAYER.top_k, mesh=mesh.local_mesh(), implementation="cuda")
    layer = functools.partial(moe.moe_layer, **how, **parse_mode("all_gather").options())
    step = expert_parallel._forward if is_forward else expert_parallel._forward_backward
    operands = types(operands, P(mesh.AXIS))
    options = None if has_options else {}
    return compiled(functools.partial(step, layer), None, *operands, options=options).as_text()


def entry(text):
    return hlo_text.computations(text)["ENTRY"]


# The expert-parallel layer


def test_no_weight_is_copied_where_no_turn_is_left():
    """Loops over further turns read transposed weights. XLA would transpose before the loops."""
    text = layer_program(is_forward=False)
    of = hlo_text.computations(text)
    branches = re.findall(r"false_computation=%?([\w.-]+)", text)
    assert len(branches) == 3
    writers = {
        op
        for name in ("ENTRY", *branches)
        for line in of[name]
        for result, op in re.findall(r" = (.*?) ([a-z][\w-]*)\(", line)[:1]
        if re.search(rf"f8e4m3fn\[({WEIGHT_SHAPES})\]", result)
    }
    others = "parameter", "tuple", "get-tuple-element", "bitcast", "conditional", "while"
    assert writers - set(others) == {"custom-call"}


def test_each_pass_waits_for_the_gpu_before_its_products():
    """A loop behind them would leave the GPU idle while the host starts the next program."""
    lines = entry(layer_program(is_forward=False))
    assert not [line for line in lines if " while(" in line or "grouped" in line]


def branch_of_forward_pass(**options):
    """The instructions of a forward pass behind the question whether turns are left."""
    text = layer_program(is_forward=True, **options)
    (branch,) = re.findall(r"false_computation=%?([\w.-]+)", text)
    return hlo_text.computations(text)[branch]


def test_a_branch_launches_little_besides_our_kernels():
    """The GPU waits for each launch behind a branch, until the first long kernel runs."""
    lines = branch_of_forward_pass()
    first = next(i for i, line in enumerate(lines) if "jax_fp8gemm_grouped_gated_gemm" in line)
    before = [line for line in lines[:first] if " fusion(" in line]
    assert len(before) <= 1  # the sizes of groups


@pytest.mark.parametrize("has_options", [True, False])
def test_strips_of_a_forward_pass_travel_back_beside_products(has_options):
    lines = branch_of_forward_pass(has_options=has_options)
    at = lambda pattern: [i for i, line in enumerate(lines) if re.search(pattern, line)]
    products = at("custom_call_target=.jax_fp8gemm_grouped_(gated_)?gemm")
    starts, ends = (at(rf" all-to-all-{kind}\(") for kind in ("start", "done"))
    assert len(products) == 1 + 2 and starts  # nothing runs beside the last strip
    assert starts[0] < products[2] < ends[0]
    of_products = [re.search(r"num_sms = (\d+)", lines[i]) for i in products]
    num_sms = [int(found[1]) for found in of_products if found]
    assert num_sms == [132, 132, 132 - 32]  # what travels beside a product has the others
    # A strip of a weight is read where it lies.
    assert not at(rf" = .*f8e4m3fn.*\[({WEIGHT_SHAPES}|32,3584,2048)\].* (copy|fusion|slice)\(")


def test_values_travel_beside_quantisation_and_results_beside_products():
    lines = entry(layer_program(is_forward=False))
    at = lambda pattern: [i for i, line in enumerate(lines) if re.search(pattern, line)]
    quantised = at(rf"f8e4m3fn\[({WEIGHT_SHAPES})\].* custom-call\(")
    assert len(quantised) == 2
    starts, ends = (at(rf" = .*f8e4m3fn.* all-gather-{kind}\(") for kind in ("start", "done"))
    assert len(starts) == len(ends) == 2  # x and dout
    assert max(starts) < min(quantised) and max(quantised) < min(ends)
    beside = hlo_text.products_beside(layer_program(is_forward=False))
    assert sorted(beside["all-to-all"])[1:] >= [2, 2]  # out and dx; not the gradients of weights


def test_rows_are_sorted_by_what_travels_first():
    lines = entry(layer_program(is_forward=True))
    collectives = [line for line in lines if re.search(r" all-gather(-start)?\(", line)]
    assert "s32[" in collectives[0] and "f8e4m3fn" in collectives[1]


def test_a_forward_pass_quantises_weights_transposed_alone():
    text = "\n".join(entry(layer_program(is_forward=True)))
    quantised = re.findall(r" = \((.*?)\) custom-call\(.*jax_fp8gemm_quantize", text)
    shapes = [re.findall(r"f8e4m3fn\[([\d,]+)\]", result) for result in quantised]
    assert sorted(shapes) == [["16,4096,7168"], ["16,7168,2048"], ["8192,7168"]]


# What runs on GPUs that are not Hopper ones


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_reference_quantises_what_a_program_rounds_to(dtype):
    run = lambda x: jax_fp8gemm.quantize(x.astype(dtype), implementation="xla")
    sharding = NamedSharding(gpu_topology.mesh(mesh.AXIS), P())
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=sharding)
    program = jax.jit(run).lower(x).compile(compiler_options=gpu_topology.COMPILER_OPTIONS)
    name = {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]
    assert f" {name}[64,256]" in program.as_text()


# Weights sharded over the GPUs that share the tokens


@functools.cache
def peak_gb(loop, is_ours):
    stack = fsdp.Stack("llama3_70b_x4", 4, 8192, 28672, 8192, loop, "bf16")
    case = fsdp.fsdp_case(stack)
    call = case.build() if is_ours else case.peers["xla_bf16"]()
    return call.peak_bytes / GB


# XLA of jax 0.10.2 plans 36.77 GB beside 35.40, of 0.11.2 35.05 beside 35.40. That is with three
# collectives at once, since 13ee6ec. With two it was 36.30 beside 35.17, and 34.94 beside 34.93.
SCAN = 1.005 if jax.__version_info__ >= (0, 11) else 1.04


@pytest.mark.parametrize(
    "loop, most", [("unrolled", 0.90), ("scan", SCAN), ("scan, gated_mlp", 0.90)]
)
def test_a_step_needs_no_more_memory_than_in_bf16(loop, most):
    """By XLA's plan.

    Measured programs, with jax 0.11 and two collectives at once, had the peaks that it planned:
    22.96, 34.94 and 30.60 GB.

    With jax 0.10 a scan of single products needs 4 % more than in bf16.
    """
    ours, bf16 = (peak_gb(loop, is_ours) for is_ours in (True, False))
    print(f"{ours:.2f} GB, bf16 {bf16:.2f}")  # pytest -rP shows it
    assert ours < most * bf16
