"""What XLA makes of layers in a scan, for an H100 that is not there: kernels, and copies.

`make gpu-programs` runs this.
"""

import re
from collections import Counter
from functools import partial

import gpu_topology
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stacks_of_a_scan as scan
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fp8gemm import matmul, quantize

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the package jax-cuda13-plugin")

# Whether XLA copies what kernels return into stacks, and slices of stacks that they read.
IS_COPIED = jax.__version_info__ < (0, 11)
# By hand. Two weights are quantised, and x of each product with its gradient, forward and backward.
# SwiGLU quantises x of the second product of experts, and dgate and dup.
KERNELS = {
    "dense": dict(quantize=2 + 2 + 2, gemm=6),
    "experts": dict(quantize=2, quantize_ragged=2, swiglu_quantize=1, swiglu_grad_quantize=1,
                    grouped_gemm=4, grouped_wgrad=2),
}  # fmt: skip


def text_of(function, *operands):
    """The program of a function for one H100."""
    on = Mesh(np.array(gpu_topology.mesh("x").devices.flat[:1]), ("x",))
    placed = NamedSharding(on, PartitionSpec())
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), operands
    )
    lowered = jax.jit(function).lower(*types)
    return lowered.compile(compiler_options=gpu_topology.COMPILER_OPTIONS).as_text()


def computations(text, operation):
    """The computations with an instruction that `operation`, a pattern, matches."""
    return [body for body in re.split(r"\n}\n", text) if re.search(f" = {operation}", body)]


@pytest.mark.parametrize("name", scan.LAYERS)
def test_kernels_run_once_and_write_into_the_stacks(name):
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    weights = [bf16(scan.NUM_LAYERS, *shape) for shape in scan.weight_shapes(name, 256, 512)]
    text = text_of(partial(scan.gradients, scan.LAYERS[name]), weights, bf16(512, 256))
    # quantize_ragged is the target of quantize too.
    found = Counter(re.findall(r'custom_call_target="jax_fp8gemm_(\w+)"', text))
    expected = dict(KERNELS[name])
    expected["quantize"] += expected.pop("quantize_ragged", 0)
    assert found == expected
    if IS_COPIED:
        return
    # Each computation that updates a slice of FP8 values, or of stacked gradients, has a kernel.
    gradients = "|".join(",".join(map(str, w.shape)) for w in weights)
    stacks = rf"(?:f8e4m3fn\[[\d,]+\]|bf16\[(?:{gradients})\])"
    updating = computations(text, rf"{stacks}\S* dynamic-update-slice\(")
    assert len(updating) >= 4 and all("custom-call(" in body for body in updating)


@pytest.mark.parametrize("name", scan.LAYERS)
def test_weights_that_are_quantised_again_are_in_no_stack(name):
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    shapes = scan.weight_shapes(name, 256, 512)
    weights = [bf16(scan.NUM_LAYERS, *shape) for shape in shapes]

    def stacks(remat):
        layer = scan.REMAT[remat](scan.LAYERS[name])
        text = text_of(partial(scan.gradients, layer), weights, bf16(768, 256))
        both_ways = [*shapes, *((*batch, n, k) for *batch, k, n in shapes)]
        stacked = (",".join(map(str, (scan.NUM_LAYERS, *shape))) for shape in both_ways)
        return set(re.findall(rf"f8e4m3fn\[(?:{'|'.join(stacked)})\]", text))

    assert stacks("kept") and not stacks("weights again")


@pytest.mark.parametrize("m", [4, 64])
def test_products_read_the_slices_of_a_stack_where_they_are(m):
    """Layers in a scan, and inside of a loop over tokens, with weights quantised before."""
    w = jax.eval_shape(
        partial(quantize, block=(128, 128), with_transpose="only"),
        jax.ShapeDtypeStruct((scan.NUM_LAYERS, 512, 512), jnp.bfloat16),
    )

    def tokens(w, x):
        layers = lambda i, x: jax.lax.scan(lambda x, w: (matmul(x, w), None), x, w)[0]
        return jax.lax.fori_loop(0, 5, layers, x)

    text = text_of(tokens, w, jax.ShapeDtypeStruct((m, 512), jnp.bfloat16))
    # Up to 8 rows the product quantises x itself.
    kernels = Counter(re.findall(r'custom_call_target="jax_fp8gemm_(\w+)"', text))
    assert kernels == (dict(quantizing_gemm=1) if m <= 8 else dict(quantize=1, gemm=1))
    if IS_COPIED:
        return
    slicing = computations(text, r"f8e4m3fn\[[\d,]+\]\S* dynamic-slice\(")
    assert slicing and all("custom-call(" in body for body in slicing)
    assert not computations(text, r"f8e4m3fn\[[\d,]+\]\S* copy\(")


@pytest.mark.parametrize("name", scan.SUMS)
def test_a_result_in_the_place_of_an_operand_is_no_slice_of_a_stack(name):
    """The kernel adds to what its result holds, so both must be one buffer: neither the slice of a
    stack that it would read where it is, nor that of another stack."""
    add, (totals, *operands) = scan.SUMS[name]
    of = lambda shape, dtype: jax.ShapeDtypeStruct((scan.NUM_LAYERS, *shape), dtype)
    text = text_of(add, of(totals, jnp.float32), *(of(x, jnp.bfloat16) for x in operands))
    calls = computations(text, r"\S+ custom-call\(.*output_to_operand_aliasing")
    assert len(calls) == 1 and not re.search(r" dynamic-(update-)?slice\(", calls[0])
