// Folders and files that nobody but this user and root can change. The disk cache loads no others.

#ifndef JAX_FP8GEMM_JIT_TRUSTED_FOLDER_H_
#define JAX_FP8GEMM_JIT_TRUSTED_FOLDER_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace jax_fp8gemm {

// An open file, closed with its scope; -1 for none.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) : fd_(other.fd_) { other.fd_ = -1; }
  FileDescriptor(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  // Closes the file before the scope ends. False if not all could be written.
  bool Close() { return close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_;
};

// Opens a folder to reach files in it. Folders that are missing are made if `make`, with mode 0700.
//
// The folder must belong to this user or root, and nobody else may write in it. The same holds for
// each folder above it, because a user who can write there could put another folder in its place.
// The sticky bit (/tmp) prevents that too, and a group that has no other member does no harm. All
// folders and links that the path passes are checked.
//
// If the result is not open, `fault` says why; "" if the folder is missing and need not be made.
FileDescriptor OpenTrustedFolder(const std::string& path, bool make, std::string* fault);

// Opens a file in such a folder for reading: a regular one that belongs to this user or root, and
// that nobody else may write; no symbolic link. `fault` as above.
FileDescriptor OpenTrustedFile(const FileDescriptor& folder, const std::string& name,
                               std::string* fault);

// All of an open file; "" if it is larger or cannot be read.
std::string ReadFile(const FileDescriptor& file, int64_t max_bytes);

// Writes a file that was not there before, with that mode whatever the umask. False with errno set
// if something of that name is there, or writing fails.
bool WriteNewFile(const FileDescriptor& folder, const std::string& name, std::string_view bytes,
                  mode_t mode);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_TRUSTED_FOLDER_H_
