// Compiled kernels on disk, shared by any number of processes.
//
// An entry is written under a temporary name and renamed, so that a reader sees all of it or
// nothing; its length and checksum are checked, so that a damaged one counts as absent. The
// checksum is for accidents. The owners and modes of the folder and the entry keep a stranger's
// kernels out (trusted_folder.h).

#ifndef JAX_FP8GEMM_JIT_DISK_CACHE_H_
#define JAX_FP8GEMM_JIT_DISK_CACHE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "jit/jit.h"

namespace jax_fp8gemm {

// FNV-1a, 128 bits. Keys and checksums need no cryptographic strength: a user who can write the
// cache folder can write a cubin there too.
class Hasher {
 public:
  // Hashes `bytes` and its length, so that ("ab", "c") and ("a", "bc") differ.
  void Update(const std::string& bytes);
  // 32 hexadecimal digits.
  std::string Hex() const;

 private:
  void UpdateRaw(const void* data, size_t bytes);
  unsigned __int128 state_ =
      (static_cast<unsigned __int128>(0x6c62272e07bb0142) << 64) | 0x62b821756295c58d;
};

// Where the kernel `name` with this key is kept.
std::string EntryPath(const std::string& cache_dir, const std::string& name,
                      const std::string& key);

// The entry, or nullopt if there is none, it is damaged or it is not to be trusted. `fault` says
// why it cannot be used; "" where it is absent or damaged.
std::optional<Cubin> ReadEntry(const std::string& path, const std::string& key, std::string* fault);

// Writes the entry, for this user alone, creating folders as needed. Returns "" or what went wrong.
std::string WriteEntry(const std::string& path, const std::string& key, const Cubin& cubin);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_DISK_CACHE_H_
