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

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the package jax-cuda13-plugin")

# By hand. Two weights are quantised, and x of each product with its gradient, forward and backward.
# SwiGLU quantises x of the second product of experts, and dgate and dup.
KERNELS = {
    "dense": dict(quantize=2 + 2 + 2, gemm=6),
    "experts": dict(quantize=2, quantize_ragged=2, swiglu_quantize=1, swiglu_grad_quantize=1,
                    grouped_gemm=4, grouped_wgrad=2),
}  # fmt: skip


def text_of(layer, name, d, f):
    on = Mesh(np.array(gpu_topology.mesh("x").devices.flat[:1]), ("x",))
    of = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(on, PartitionSpec()))
    weights = [
        of((scan.NUM_LAYERS, *shape), jnp.bfloat16) for shape in scan.weight_shapes(name, d, f)
    ]
    lowered = jax.jit(partial(scan.gradients, layer)).lower(weights, of((512, d), jnp.bfloat16))
    return lowered.compile(compiler_options=gpu_topology.COMPILER_OPTIONS).as_text()


@pytest.mark.parametrize("name", scan.LAYERS)
def test_kernels_run_once_and_write_into_the_stacks(name):
    text = text_of(scan.LAYERS[name], name, 256, 512)
    # quantize_ragged is the target of quantize too.
    found = Counter(re.findall(r'custom_call_target="jax_fp8gemm_(\w+)"', text))
    expected = dict(KERNELS[name])
    expected["quantize"] += expected.pop("quantize_ragged", 0)
    assert found == expected
    if jax.__version_info__ < (0, 11):
        return  # there XLA copies what the kernels return into the stacks
    # Each computation that updates a slice of FP8 values, or of stacked gradients, has a kernel.
    of_stack = lambda shape: ",".join(map(str, (scan.NUM_LAYERS, *shape)))
    gradients = "|".join(map(of_stack, scan.weight_shapes(name, 256, 512)))
    stacks = rf"(?:f8e4m3fn\[[\d,]+\]|bf16\[(?:{gradients})\])"
    update = re.compile(rf" = {stacks}\S* dynamic-update-slice\(")
    updating = [body for body in re.split(r"\n}\n", text) if update.search(body)]
    assert len(updating) >= 4 and all("custom-call(" in body for body in updating)
