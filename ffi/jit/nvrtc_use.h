// No compilation is cut in two by a fork or by the end of the process.
//
// While NVRTC compiles, a fork would leave its locks taken in the child for ever. The destructors
// that run when a process ends would destroy its data under it.

#ifndef JAX_FP8GEMM_JIT_NVRTC_USE_H_
#define JAX_FP8GEMM_JIT_NVRTC_USE_H_

namespace jax_fp8gemm {

// Whoever opens or runs NVRTC holds one; several threads may. A fork waits for all of them, and the
// child begins with none.
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

// Waits for all uses, and grants no more: for a process about to end.
void EndNvrtcUses();

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_NVRTC_USE_H_
