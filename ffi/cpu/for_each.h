// Work on the threads of XLA's CPU backend.

#ifndef JAX_FP8GEMM_CPU_FOR_EACH_H_
#define JAX_FP8GEMM_CPU_FOR_EACH_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "errors.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// Runs body(0) to body(count - 1) on this thread and on those of XLA, on `most_threads` at most,
// and waits for all.
template <typename Body>
void ForEach(ffi::ThreadPool& pool, int64_t count, int64_t most_threads, const Body& body) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  const auto progress = std::make_shared<Progress>();
  // NOTE: a task may begin after all is done. It must not touch `body` then.
  const auto work = [progress, count, &body] {
    for (int64_t i = progress->next++; i < count; i = progress->next++) {
      body(i);
      ++progress->done;
    }
  };
  const int64_t num_threads = std::min({pool.num_threads(), count, most_threads});
  for (int64_t i = 1; i < num_threads; ++i) pool.Schedule([work] { work(); });
  work();
  // Others are at their last call of `body`, if at any.
  while (progress->done < count) std::this_thread::yield();
}

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_CPU_FOR_EACH_H_
