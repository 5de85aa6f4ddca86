#include "disk_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <system_error>

#include "errors.h"

namespace jax_fp8gemm {
namespace {

namespace fs = std::filesystem;

// Change it whenever the layout below changes.
constexpr char kMagic[8] = {'F', 'P', '8', 'G', 'E', 'M', 'M', '2'};

// An entry is a FileHeader, then `name`, `log` and `image` of the sizes given in it.
struct FileHeader {
  char magic[8];
  char key[32];
  char checksum[32];  // of all that follows this field
  int32_t registers;
  int32_t spill_bytes;
  uint64_t name_bytes;
  uint64_t log_bytes;
  uint64_t image_bytes;
};

std::string Checksum(const std::string& file) {
  Hasher hasher;
  hasher.Update(file.substr(offsetof(FileHeader, registers)));
  return hasher.Hex();
}

// Whether name, log and image fill `rest`, the bytes behind the header, and no more.
bool AreSizesRight(const FileHeader& header, uint64_t rest) {
  // One by one: the sum of three sizes can overflow.
  for (const uint64_t bytes : {header.name_bytes, header.log_bytes, header.image_bytes}) {
    if (bytes > rest) return false;
    rest -= bytes;
  }
  return rest == 0;
}

// Writes all of `bytes` to a new file. Returns false with errno set.
bool WriteFile(const std::string& path, const std::string& bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return false;
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t n = write(fd, bytes.data() + written, bytes.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    written += n;
  }
  const int write_errno = errno;
  const bool is_closed = close(fd) == 0;
  if (written < bytes.size()) errno = write_errno;
  return is_closed && written == bytes.size();
}

}  // namespace

void Hasher::UpdateRaw(const void* data, size_t bytes) {
  constexpr unsigned __int128 kPrime = (static_cast<unsigned __int128>(1) << 88) | 0x13b;
  const auto* byte = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) {
    state_ = (state_ ^ byte[i]) * kPrime;
  }
}

void Hasher::Update(const std::string& bytes) {
  const uint64_t size = bytes.size();
  UpdateRaw(&size, sizeof(size));
  UpdateRaw(bytes.data(), bytes.size());
}

std::string Hasher::Hex() const {
  std::string hex;
  for (int shift = 124; shift >= 0; shift -= 4) {
    hex += "0123456789abcdef"[static_cast<int>(state_ >> shift) & 15];
  }
  return hex;
}

std::string EntryPath(const std::string& cache_dir, const std::string& name,
                      const std::string& key) {
  return (fs::path(cache_dir) / StrCat(name, "-", key, ".kernel")).string();
}

std::optional<Cubin> ReadEntry(const std::string& path, const std::string& key) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  // Unlike iterators, << does not throw where reading fails.
  if (!stream || !(text << stream.rdbuf())) return std::nullopt;
  const std::string file = text.str();
  FileHeader header;
  if (file.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, file.data(), sizeof(header));
  const std::string checksum = Checksum(file);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 ||
      std::memcmp(header.key, key.data(), sizeof(header.key)) != 0 ||
      std::memcmp(header.checksum, checksum.data(), sizeof(header.checksum)) != 0 ||
      !AreSizesRight(header, file.size() - sizeof(header))) {
    return std::nullopt;
  }
  Cubin cubin;
  size_t at = sizeof(header);
  cubin.name = file.substr(at, header.name_bytes);
  at += header.name_bytes;
  cubin.log = file.substr(at, header.log_bytes);
  at += header.log_bytes;
  cubin.image.assign(file.begin() + at, file.begin() + at + header.image_bytes);
  cubin.registers = header.registers;
  cubin.spill_bytes = header.spill_bytes;
  cubin.from_disk = true;
  return cubin;
}

std::string WriteEntry(const std::string& path, const std::string& key, const Cubin& cubin) {
  FileHeader header = {};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  std::memcpy(header.key, key.data(), sizeof(header.key));
  header.registers = cubin.registers;
  header.spill_bytes = cubin.spill_bytes;
  header.name_bytes = cubin.name.size();
  header.log_bytes = cubin.log.size();
  header.image_bytes = cubin.image.size();
  std::string file(reinterpret_cast<const char*>(&header), sizeof(header));
  file += cubin.name;
  file += cubin.log;
  file.append(cubin.image.begin(), cubin.image.end());
  file.replace(offsetof(FileHeader, checksum), sizeof(header.checksum), Checksum(file));

  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  if (error) return StrCat(fs::path(path).parent_path().string(), ": ", error.message());
  const std::string temporary = StrCat(path, ".", getpid(), ".", std::random_device{}(), ".tmp");
  if (!WriteFile(temporary, file)) {
    const std::string message = StrCat(temporary, ": ", std::strerror(errno));
    fs::remove(temporary, error);
    return message;
  }
  fs::rename(temporary, path, error);
  if (error) {
    const std::string message = StrCat(path, ": ", error.message());
    fs::remove(temporary, error);
    return message;
  }
  return "";
}

}  // namespace jax_fp8gemm
