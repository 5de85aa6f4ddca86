// What the disk cache does not keep for ever: files that a killed process left, kernels of old
// sources, and more than so many bytes.

#ifndef JAX_FP8GEMM_JIT_CLEAN_CACHE_H_
#define JAX_FP8GEMM_JIT_CLEAN_CACHE_H_

#include <cstdint>
#include <ctime>

#include "jit/trusted_folder.h"

namespace jax_fp8gemm {

constexpr time_t kMaxTemporarySeconds = 60 * 60;
constexpr time_t kMaxUnusedSeconds = 30 * 24 * 60 * 60;
constexpr int64_t kMaxCacheBytes = 256 << 20;

// An entry's time of modification is that of its last use, to a day.
constexpr time_t kUseSeconds = 24 * 60 * 60;

// Removes temporary files and entries that are older than that at the time `now`, then the entries
// that were used longest ago until the others have at most kMaxCacheBytes. Leaves alone whatever
// the cache did not name. Other processes may read, write and clean at the same time: whoever has
// an entry open keeps it, and a fresh temporary file is nobody else's.
void CleanCache(const FileDescriptor& folder, time_t now);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_CLEAN_CACHE_H_
