#include "jit/disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <random>

#include "errors.h"
#include "jit/clean_cache.h"
#include "jit/trusted_folder.h"

namespace jax_fp8gemm {
namespace {

namespace fs = std::filesystem;

// Change it whenever the layout below changes.
constexpr char kMagic[8] = {'F', 'P', '8', 'G', 'E', 'M', 'M', '2'};

// Entries have some 40 KB.
constexpr off_t kMaxEntryBytes = 64 << 20;

// A process cleans the folder after its first write, and then after every so many.
constexpr uint64_t kWritesPerCleaning = 100;

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

// Dates an entry anew that is used now and was not for a day: cleaning goes by that.
void MarkUsed(int fd) {
  struct stat info;
  if (fstat(fd, &info) == 0 && std::time(nullptr) - info.st_mtime > kUseSeconds) {
    futimens(fd, nullptr);  // fails on what an administrator wrote for all
  }
}

// When a file was written, by the clock that all other files go by, or this host's.
time_t TimeOf(const FileDescriptor& folder, const std::string& name) {
  struct stat info;
  return fstatat(folder.get(), name.c_str(), &info, 0) == 0 ? info.st_mtime : std::time(nullptr);
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

std::optional<Cubin> ReadEntry(const std::string& path, const std::string& key,
                               std::string* fault) {
  const fs::path folder_path = fs::path(path).parent_path();
  const FileDescriptor folder = OpenTrustedFolder(folder_path, false, fault);
  if (!folder.is_open()) {
    if (!fault->empty()) *fault = StrCat("cache folder ", folder_path.string(), ": ", *fault);
    return std::nullopt;
  }
  const FileDescriptor opened = OpenTrustedFile(folder, fs::path(path).filename().string(), fault);
  if (!opened.is_open()) {
    if (!fault->empty()) *fault = StrCat("cache entry in ", folder_path.string(), ": ", *fault);
    return std::nullopt;
  }
  const std::string file = ReadFile(opened, kMaxEntryBytes);
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
  MarkUsed(opened.get());
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

  const fs::path folder_path = fs::path(path).parent_path();
  std::string fault;
  const FileDescriptor folder = OpenTrustedFolder(folder_path, true, &fault);
  if (!folder.is_open()) return StrCat("cache folder ", folder_path.string(), ": ", fault);
  const std::string name = fs::path(path).filename().string();
  const std::string temporary = StrCat(name, ".", getpid(), ".", std::random_device{}(), ".tmp");
  if (WriteNewFile(folder, temporary, file, 0600) &&
      renameat(folder.get(), temporary.c_str(), folder.get(), name.c_str()) == 0) {
    // Listing the folder takes far less time than compiling, but is not free on a network.
    static std::atomic<uint64_t> num_written{0};
    if (num_written++ % kWritesPerCleaning == 0) CleanCache(folder, TimeOf(folder, name));
    return "";
  }
  const std::string message = StrCat("cannot write ", path, ": ", std::strerror(errno));
  unlinkat(folder.get(), temporary.c_str(), 0);
  return message;
}

}  // namespace jax_fp8gemm
