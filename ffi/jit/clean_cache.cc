#include "jit/clean_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace jax_fp8gemm {
namespace {

struct CachedFile {
  time_t used;
  int64_t bytes;
  std::string name;
};

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// "<kernel>-<32 hexadecimal digits>.kernel"
bool IsEntry(std::string_view name) {
  constexpr std::string_view kSuffix = ".kernel";
  constexpr size_t kKeyDigits = 32;
  if (!EndsWith(name, kSuffix) || name.size() < kSuffix.size() + kKeyDigits + 2) return false;
  name.remove_suffix(kSuffix.size());
  const std::string_view key = name.substr(name.size() - kKeyDigits);
  return key.find_first_not_of("0123456789abcdef") == key.npos &&
         name[name.size() - kKeyDigits - 1] == '-';
}

// "<entry>.<process>.<random number>.tmp"
bool IsTemporary(std::string_view name) {
  if (!EndsWith(name, ".tmp")) return false;
  for (int i = 0; i < 3; ++i) name = name.substr(0, name.rfind('.'));
  return IsEntry(name);
}

}  // namespace

void CleanCache(const FileDescriptor& folder, time_t now) {
  const int listed = openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* files = listed < 0 ? nullptr : fdopendir(listed);
  if (files == nullptr) {
    if (listed >= 0) close(listed);
    return;
  }
  const auto remove = [&](const std::string& name) { unlinkat(folder.get(), name.c_str(), 0); };
  std::vector<CachedFile> entries;
  int64_t bytes = 0;
  while (const dirent* file = readdir(files)) {
    const std::string name = file->d_name;
    const bool is_entry = IsEntry(name);
    struct stat info;
    if ((!is_entry && !IsTemporary(name)) ||
        fstatat(folder.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(info.st_mode)) {
      continue;
    }
    if (now - info.st_mtime > (is_entry ? kMaxUnusedSeconds : kMaxTemporarySeconds)) {
      remove(name);
    } else if (is_entry) {
      entries.push_back({info.st_mtime, info.st_size, name});
      bytes += info.st_size;
    }
  }
  closedir(files);
  const auto order = [](const CachedFile& file) { return std::tie(file.used, file.name); };
  std::sort(entries.begin(), entries.end(),
            [&](const CachedFile& a, const CachedFile& b) { return order(a) < order(b); });
  for (size_t i = 0; i < entries.size() && bytes > kMaxCacheBytes; ++i) {
    remove(entries[i].name);
    bytes -= entries[i].bytes;
  }
}

}  // namespace jax_fp8gemm
