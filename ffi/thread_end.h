// What a thread does that is told to end while functions that throw nothing lie on its stack.

#ifndef JAX_FP8GEMM_THREAD_END_H_
#define JAX_FP8GEMM_THREAD_END_H_

namespace jax_fp8gemm {

// Runs call(argument). If that calls pthread_exit, the thread sleeps until the process ends.
void SleepIfThreadEnds(void (*call)(void*), void* argument);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_THREAD_END_H_
