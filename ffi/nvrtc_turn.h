// One compilation at a time, none of them cut in two by a fork or by the end of the process.
//
// NVRTC compiles one program at a time. While it does, a fork would leave its locks taken in the
// child for ever, and the destructors that run when a process ends would destroy its data under it.

#ifndef JAX_FP8GEMM_NVRTC_TURN_H_
#define JAX_FP8GEMM_NVRTC_TURN_H_

namespace jax_fp8gemm {

// Whoever opens or runs NVRTC holds one. A fork waits for it, and the child begins with none taken.
class NvrtcTurn {
 public:
  // Waits for the turns and the forks of other threads.
  NvrtcTurn();
  ~NvrtcTurn();
  NvrtcTurn(const NvrtcTurn&) = delete;

  // False once EndNvrtcTurns was called: NVRTC must be left alone.
  bool is_granted() const { return is_granted_; }

 private:
  bool is_granted_;
};

// Waits for the turn that is taken, and grants no more: for a process about to end.
void EndNvrtcTurns();

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_NVRTC_TURN_H_
