// Cleans the folder of the disk cache: removes files that a killed process left and kernels that
// nobody used for long, and keeps the rest below a number of bytes.

#ifndef JAX_FP8GEMM_JIT_CLEAN_CACHE_H_
#define JAX_FP8GEMM_JIT_CLEAN_CACHE_H_

#include <cstdint>
#include <ctime>

#include "jit/trusted_folder.h"

namespace jax_fp8gemm {

constexpr time_t kMaxTemporarySeconds = 60 * 60;
constexpr time_t kMaxUnusedSeconds = 30 * 24 * 60 * 60;
constexpr int64_t kMaxCacheBytes = 256 << 20;

// An entry's time of modification says when it was last used. It may be a day behind.
constexpr time_t kUseSeconds = 24 * 60 * 60;

// Removes temporary files and entries that are older at the time `now` than the limits above, then
// the entries that were used longest ago until the others have at most kMaxCacheBytes. Leaves files
// alone whose names the cache did not make. Other processes may read, write and clean at the same
// time: a process that has an entry open can read on, and no process removes a fresh temporary
// file.
void CleanCache(const FileDescriptor& folder, time_t now);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_CLEAN_CACHE_H_
