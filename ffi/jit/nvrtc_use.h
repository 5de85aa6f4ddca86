// Keeps a fork or the end of the process from interrupting a compilation.
//
// A fork while NVRTC compiles would leave NVRTC's locks taken in the child for ever. The
// destructors that run when a process ends would destroy NVRTC's data while it compiles.

#ifndef JAX_FP8GEMM_JIT_NVRTC_USE_H_
#define JAX_FP8GEMM_JIT_NVRTC_USE_H_

namespace jax_fp8gemm {

// A thread holds one while it opens or runs NVRTC; several threads may at the same time. A fork
// waits until nobody holds one, and the child begins with none.
class NvrtcUse {
 public:
  // Waits for the forks of other threads.
  NvrtcUse();
  ~NvrtcUse();
  NvrtcUse(const NvrtcUse&) = delete;

  // False once EndNvrtcUses was called: NVRTC must be left alone.
  bool is_granted() const { return is_granted_; }

 private:
  bool is_granted_;
};

// Waits for all uses, and grants no more. For a process that is about to end.
void EndNvrtcUses();

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_NVRTC_USE_H_
