"""moe_layer with its experts on all GPUs, by its kernels and by XLA's collectives."""

import functools
import os

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import all_gpus
from test_expert_parallel import vjp
from test_mesh_gpu import place

from benchmarks.families.hlo_text import products_beside
from benchmarks.families.mesh import moved_bytes
from jax_fp8gemm._data.recipe import BF16, DEEPSEEK_V3, Recipe
from jax_fp8gemm.moe import _mlp_products, moe_layer, route
from jax_fp8gemm.moe._parallel import exchange as _exchange
from jax_fp8gemm.moe._parallel import expert_spec as _expert_spec
from jax_fp8gemm.moe._parallel import strips as _strips
from jax_fp8gemm.moe._parallel.exchange import NAMES

pytestmark = pytest.mark.gpu

TOKENS, EXPERTS = 2048, 4  # of each GPU
# Two experts a token: even on two GPUs all_to_all has slots for 7 in 8 tokens, so a loop.
TOP_K, D, F = 2, 1024, 512
POW2 = Recipe(pow2_scale=True)


def one_axis():
    return all_gpus(AxisType.Auto)


@functools.cache
def problem(skew=0.0):
    """x, indices, weights, w_gate_up, w_down and dout, bf16 but for the choices, on one GPU.

    Not logits, so that all programs have the bits of one softmax. skew: of logits to an expert.
    """
    m, e = one_axis().size * TOKENS, one_axis().size * EXPERTS
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    in_bf16 = lambda *shape, scale=1.0: (normal(*shape) * scale).astype(jnp.bfloat16)
    choice = route(normal(m, e) + skew * jnp.eye(e)[2:3], TOP_K)
    weights = in_bf16(e, D, 2 * F, scale=D**-0.5), in_bf16(e, F, D, scale=F**-0.5)
    return in_bf16(m, D), *choice, *weights, in_bf16(m, D)


def compiled(layer, operands, **compiler_options):
    """vjp of the layer, without autotuning of XLA's own products."""
    jitted = jax.jit(functools.partial(vjp, layer))
    options = gpu_cases.COMPILER_OPTIONS | compiler_options
    return jitted.lower(*operands).compile(compiler_options=options)


def spread(skew=0.0):
    return place(one_axis(), problem(skew), [P("x")] * 6)


def compile_spread(exchange, recipe=DEEPSEEK_V3, parts=1, **compiler_options):
    """The compiled vjp of the layer whose experts are spread."""
    layer = functools.partial(
        moe_layer,
        mesh=one_axis(),
        expert_axis="x",
        exchange=exchange,
        parts=parts,
        recipe=recipe,
        implementation=gpu_cases.IMPLEMENTATION if recipe.is_fp8 else None,
    )
    return compiled(layer, spread(), **compiler_options)


# For tests that change nothing of how a program is made.
program = functools.cache(compile_spread)


def diffs(found, expected):
    return [reference.calc_diff(x, y) for x, y in zip(found, expected, strict=True)]


def test_every_exchange_and_every_run_gives_the_same_bits():
    runs = {name: [program(name)(*spread()) for _ in range(3)] for name in NAMES}
    expected, *_ = runs["all_gather"]
    for name, results in runs.items():
        for i, found in enumerate(results):
            for x, y in zip(found, expected, strict=True):
                reference.assert_same_bits(x, y, f"{name}, run {i}")


@pytest.mark.parametrize(
    "recipe, result_tolerance",
    [
        # One GPU reads x with other scales: everything is rounded elsewhere, as against the truth.
        (DEEPSEEK_V3, 5e-3),
        # The same FP8 values. What a token gets is added in f32 on one GPU; here the part of each
        # GPU is rounded to bf16.
        (POW2, 1e-5),
    ],
    ids=["f32 scales", "power-of-two scales"],
)
def test_result_and_gradients_are_those_of_one_gpu(recipe, result_tolerance):
    found = program("all_gather", recipe)(*spread())
    layer = functools.partial(moe_layer, recipe=recipe, implementation=gpu_cases.IMPLEMENTATION)
    expected = compiled(layer, problem())(*problem())
    result, *gradients = diffs(found, expected)
    print(result, gradients)  # pytest -rP shows them
    assert result < result_tolerance
    # One GPU quantises dout after it is weighted, and the columns of x and dout from bf16.
    assert max(gradients) < 5e-3


def test_a_pair_of_exchanges_is_the_layer_of_one_gpu():
    """On two halves of the GPUs, as if they were hosts."""
    num = one_axis().size
    if num < 4:
        pytest.skip(f"needs four GPUs; got {num}")
    axes = ("host", "device")
    halves = one_axis().devices.reshape(2, -1)
    on = jax.sharding.Mesh(halves, axes, axis_types=(AxisType.Auto,) * 2)
    layer = functools.partial(
        moe_layer,
        mesh=on,
        expert_axis=axes,
        recipe=POW2,
        implementation=gpu_cases.IMPLEMENTATION,
    )
    operands = place(on, problem(), [P(axes)] * 6)
    pairs = ("all_to_all", "all_gather"), ("ragged_all_to_all", "ragged_all_to_all")
    found, other = (
        compiled(functools.partial(layer, exchange=pair), operands)(*operands) for pair in pairs
    )
    for x, y in zip(other, found, strict=True):
        reference.assert_same_bits(x, y)
    expected = program("all_gather", POW2)(*spread())
    result, *gradients = diffs(found, expected)
    print(result, gradients)
    # A host's sum is rounded to bf16 once more.
    assert result < 1e-5
    # Rows arrive in another order, so gradients of weights have other scale blocks.
    assert max(gradients) < 5e-3


def test_several_turns_of_rows_and_of_tokens(traced_anew, monkeypatch):
    """On tokens most of which choose one expert."""
    expected = program("all_gather")(*spread(5.0))
    monkeypatch.setattr(_exchange, "HEADROOM", 0.25)
    monkeypatch.setattr(_expert_spec, "_HEADROOM", 0.25)
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 128)
    found = compile_spread("all_to_all")(*spread(5.0))
    print(diffs(found, expected))
    *of_tokens, dw_gate_up, dw_down = diffs(found, expected)
    # What the turns add to a token is rounded to bf16.
    assert max(of_tokens) < 1e-5
    # Turns cut the tokens of an expert into other blocks.
    assert max(dw_gate_up, dw_down) < 5e-3


@pytest.mark.parametrize("skew", [0.0, 5.0], ids=["one turn", "several on one GPU"])
@pytest.mark.parametrize("name", NAMES)
def test_strips_have_the_bits_of_the_whole(traced_anew, monkeypatch, name, skew):
    """In a forward pass that is not differentiated."""
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 128)
    operands = spread(skew)[:-1]

    def run():
        jax.clear_caches()
        layer = functools.partial(
            moe_layer,
            mesh=one_axis(),
            expert_axis="x",
            exchange=name,
            implementation=gpu_cases.IMPLEMENTATION,
        )
        jitted = jax.jit(lambda x, indices, weights, *rest: layer(x, (indices, weights), *rest))
        program = jitted.lower(*operands).compile(compiler_options=gpu_cases.COMPILER_OPTIONS)
        return program, program(*operands)

    whole, expected = run()
    monkeypatch.setattr(_strips, "_MIN_STRIP_BYTES", 1)
    strips, found = run()
    target = 'custom_call_target="jax_fp8gemm_grouped_gemm"'
    num_products = [program.as_text().count(target) for program in (whole, strips)]
    assert num_products[1] == num_products[0] + 1  # two strips in the branch of one turn
    reference.assert_same_bits(found, expected)
    for _ in range(3):
        reference.assert_same_bits(strips(*operands), found)


@pytest.mark.parametrize("skew", [0.0, 5.0], ids=["one turn", "several on one GPU"])
def test_h_of_one_kernel_has_the_bits_of_two(traced_anew, monkeypatch, skew):
    """In a forward pass that is not differentiated."""
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 128)
    operands = spread(skew)[:-1]
    target = 'custom_call_target="jax_fp8gemm_grouped_gated_gemm"'
    how = dict(mesh=one_axis(), expert_axis="x", implementation=gpu_cases.IMPLEMENTATION)
    results = []
    for at_once in (True, False):
        monkeypatch.setattr(_mlp_products, "is_faster", lambda *sizes, found=at_once: found)
        jax.clear_caches()
        run = lambda x, indices, weights, *rest: moe_layer(x, (indices, weights), *rest, **how)
        program = jax.jit(run).lower(*operands).compile(gpu_cases.COMPILER_OPTIONS)
        assert (target in program.as_text()) == at_once
        results.append(program(*operands))
    reference.assert_same_bits(*results)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_give_tokens_the_bits_of_one_part(parts):
    expected = program("all_gather")(*spread())
    for name in NAMES:
        run = compile_spread(name, parts=parts)
        found, *others = (run(*spread()) for _ in range(3))
        for other in others:
            jax.tree.map(reference.assert_same_bits, other, found)
        for x, y in zip(found[:2], expected[:2], strict=True):
            reference.assert_same_bits(x, y, name)
        of_weights = diffs(found, expected)[2:]
        print(name, of_weights)  # pytest -rP shows them
        # Of the weights of choices f32 sums. Parts cut the tokens of an expert into other blocks.
        assert of_weights[0] < 1e-9 and max(of_weights) < 5e-3


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_collectives_of_parts_run_beside_products(name):
    scheduler = dict(xla_gpu_enable_latency_hiding_scheduler=True)
    beside = products_beside(compile_spread(name, parts=2, **scheduler).as_text())
    print(beside)  # pytest -rP shows it
    there, back = ("all-gather", "all-to-all") if name == "all_gather" else ("all-to-all",) * 2
    # The tokens of the second part travel, and so do the results of the first one.
    assert max(beside[there]) > 0 and max(beside[back]) > 0


def test_tokens_travel_as_fp8():
    num = one_axis().size
    ours, bf16 = (
        {kind: n for kind, n in moved.items() if kind.startswith("all-gather")}
        for moved in (
            moved_bytes(program("all_gather", recipe).as_text(), num)
            for recipe in (DEEPSEEK_V3, BF16)
        )
    )
    m = num * TOKENS
    # x and dout, a scale for 128 of their values, and of x's choices indices and weights.
    assert ours == {
        "all-gather f8e4m3fn": 2 * m * D,
        "all-gather f32": 2 * m * D // 128 * 4 + m * TOP_K * 4,
        "all-gather s32": m * TOP_K * 4,
    }
    assert bf16["all-gather bf16"] == 2 * m * D * 2
    assert sum(ours.values()) <= 0.55 * sum(bf16.values())


@pytest.mark.parametrize("name", NAMES)
def test_kernels_and_collectives_of_a_program(name):
    text = program(name).as_text()
    for kernel in (
        "grouped_gemm",
        "grouped_wgrad",
        "swiglu_quantize",
        "weighted_swiglu_grad_quantize",
    ):
        assert f'custom_call_target="jax_fp8gemm_{kernel}"' in text
    kinds = {kind.split()[0] for kind in moved_bytes(text, one_axis().size)}
    expected = {
        "all_gather": {"all-gather", "all-to-all"},
        # The number of turns is the largest of any GPU.
        "all_to_all": {"all-to-all", "all-reduce"},
        # Counts of tokens are gathered.
        "ragged_all_to_all": {"all-gather", "ragged-all-to-all"},
    }
    assert kinds == expected[name]


@pytest.mark.parametrize("name", NAMES)
def test_two_hundred_steps_in_cuda_graphs(name, tmp_path):
    """They end, and change no bit."""
    one_axis()
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    in_graphs = f"{flags} --xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}"
    hashes = []
    for of_run in (in_graphs, f"{flags} --xla_gpu_enable_command_buffer="):
        how = dict(program="expert_steps_program.py", timeout=120, XLA_FLAGS=of_run)
        run = gpu_cases.run_program(name, "200", **how)
        assert run.returncode == 0, run.stderr
        hashes.append(run.stdout)
    assert "kCommandBuffer" in gpu_cases.thunks(tmp_path), "no CUDA graph was made"
    assert hashes[0] == hashes[1] != ""
