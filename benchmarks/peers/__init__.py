"""Other implementations of the same products.

- deepgemm: DeepGEMM.
- cublaslt_tensorwise: torch._scaled_mm, one scale a tensor, fast accumulation: an easier job. Of
  grouped products: of all valid rows with one matrix, what a dense product would take.
- cublaslt_block: torch.nn.functional.scaled_mm with our scale blocks.
- torch_bf16: torch.mm on bf16; of grouped products, torch's grouped_mm.
- xla_fp8: XLA's rewrite of an FP8 dot_general with a scale for each operand.
- xla_bf16: jax.lax.dot_general on bf16.
- xla: of `quantize`, our function in plain JAX.
- copy: of `quantize`, a copy within the device that reads and writes as many bytes.
- silu: of `activation`, our kernel of SwiGLU.
- quantised_apart: of `decode`, our call that quantises each lhs by a kernel of its own.
- split_k: of `dense`, our call that may add up a contraction in parts.
- unused_undefined: of `masked`, our call that leaves unused rows as they are in memory.
- quantised_once: of `moe` and `step`, our call with weights quantised once for many calls.
- square_once: of `moe`, the same, and weight gradients with 128x128 blocks of lhs.
- fp8_gate_up: of `moe`, our call that keeps gate_up in FP8 for its backward pass.
- fp8_head_swiglu: of `model`, our product in the head too, and SwiGLU fused with its quantisation.
- fp8_head_swiglu_square: the same, and weight gradients from squares.
- square_wgrad: of `model` and `fsdp`, our step with weight gradients from squares.
- fp8_combine: of `expert-parallel`, our layer whose results travel back in FP8.
- copy_engines: of `expert-parallel`, our layer with XLA's flag by which all_to_all copies between
  GPUs of a process without multiprocessors.
- lax_ragged_dot: jax.lax.ragged_dot on bf16; for weight gradients jax.lax.ragged_dot_general.
- lax_ragged_dot_cudnn: the same with XLA's flag for cuDNN's grouped kernels.
- tokamax: the same of tokamax on its Mosaic GPU kernel, the best of a few configs.
- one_gpu: the layer of one GPU alone, while the others wait.
- every_gpu: of `expert-parallel`, the layer of one GPU on all of them at once, each with its own.
- 1d1d: of `wgrad-square` and `ragged-wgrad-square`, our kernel with 1x128 blocks on both sides.
"""

NAMES = (
    *("deepgemm", "cublaslt_tensorwise", "cublaslt_block", "torch_bf16", "xla_fp8", "xla_bf16"),
    *("xla", "copy", "silu", "quantised_once", "lax_ragged_dot", "lax_ragged_dot_cudnn", "tokamax"),
    *("one_gpu", "1d1d", "unused_undefined", "square_once", "fp8_gate_up", "fp8_head_swiglu"),
    *("fp8_head_swiglu_square", "square_wgrad", "fp8_combine", "copy_engines", "every_gpu"),
    *("split_k", "quantised_apart"),
)


class AbsentError(RuntimeError):
    """A peer cannot run a row here; the text says why."""
