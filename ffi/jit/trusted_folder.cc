#include "jit/trusted_folder.h"

#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <deque>
#include <sstream>

#include "errors.h"

namespace jax_fp8gemm {
namespace {

constexpr int kMaxLinks = 40;  // of one path, as the kernel has it

// Whether the group has this user alone, as where each user has a group of the same name.
bool IsPrivateGroup(gid_t id) {
  char user_text[4096], group_text[4096];
  struct passwd user_memory, *user = nullptr;
  struct group group_memory, *group = nullptr;
  getpwuid_r(geteuid(), &user_memory, user_text, sizeof(user_text), &user);
  getgrgid_r(id, &group_memory, group_text, sizeof(group_text), &group);
  if (user == nullptr || group == nullptr || user->pw_gid != id) return false;
  const bool has_one_member =
      group->gr_mem[0] == nullptr ||
      (std::strcmp(group->gr_mem[0], user->pw_name) == 0 && group->gr_mem[1] == nullptr);
  return has_one_member && std::strcmp(user->pw_name, group->gr_name) == 0;
}

// Why somebody else can change the folder or file; "" if nobody can.
std::string Distrust(const std::string& path, const struct stat& info, bool is_above) {
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return StrCat(path, " belongs to uid ", info.st_uid, ", which is neither yours nor root's");
  }
  mode_t others = info.st_mode & (S_IWGRP | S_IWOTH);
  if (S_ISLNK(info.st_mode)) others = 0;  // nobody can write a link
  if (is_above && (info.st_mode & S_ISVTX)) others = 0;
  if (is_above && others == S_IWGRP && IsPrivateGroup(info.st_gid)) others = 0;
  if (others == 0) return "";
  char mode[8];
  std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(info.st_mode & 07777));
  return StrCat("others can write ", path, " (mode ", mode, "; chmod go-w keeps them out)");
}

void AddFront(const std::string& path, std::deque<std::string>& parts) {
  std::istringstream stream(path);
  std::deque<std::string> front;
  for (std::string part; std::getline(stream, part, '/');) {
    if (!part.empty() && part != ".") front.push_back(part);
  }
  parts.insert(parts.begin(), front.begin(), front.end());
}

// Makes a folder for this user alone, unless another process just made it.
bool MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0) return errno == EEXIST;
  return chmod(path.c_str(), 0700) == 0;  // whatever the umask took away
}

// Goes from "/" to the folder at `path`, and checks all that it passes. Returns the folder's path
// without symbolic links, or "" with `fault` as in OpenTrustedFolder.
std::string Walk(const std::string& path, bool make, std::string* fault) {
  std::deque<std::string> parts;
  AddFront(path, parts);
  std::string at;  // "" stands for "/"
  int num_links = 0;
  struct stat info;
  const auto fail = [&](const std::string& where) {
    const char* what = std::strerror(errno);
    *fault = where == path ? what : StrCat(where, ": ", what);
    return std::string();
  };
  while (true) {
    const std::string here = at.empty() ? "/" : at;
    if (lstat(here.c_str(), &info) != 0) return fail(here);
    *fault = Distrust(here, info, !parts.empty());
    if (!fault->empty()) return "";
    if (parts.empty()) return here;
    const std::string part = parts.front();
    parts.pop_front();
    if (part == "..") {
      at.erase(at.empty() ? 0 : at.rfind('/'));
      continue;
    }
    const std::string next = StrCat(at, "/", part);
    if (lstat(next.c_str(), &info) != 0) {
      if (errno == ENOENT && !make) return "";
      if (errno != ENOENT || !MakeFolder(next) || lstat(next.c_str(), &info) != 0)
        return fail(next);
    }
    if (S_ISLNK(info.st_mode)) {
      *fault = Distrust(next, info, false);
      if (!fault->empty()) return "";
      char target[PATH_MAX];
      const ssize_t bytes = readlink(next.c_str(), target, sizeof(target));
      if (bytes < 0) return fail(next);
      errno = ELOOP;
      if (++num_links > kMaxLinks) return fail(next);
      AddFront(std::string(target, bytes), parts);
      if (target[0] == '/') at.clear();
      continue;
    }
    errno = parts.empty() ? EEXIST : ENOTDIR;
    if (!S_ISDIR(info.st_mode)) return fail(next);
    at = next;
  }
}

}  // namespace

FileDescriptor OpenTrustedFolder(const std::string& path, bool make, std::string* fault) {
  const std::string folder = Walk(path, make, fault);
  if (folder.empty()) return FileDescriptor();
  FileDescriptor opened(open(folder.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!opened.is_open()) *fault = StrCat(folder, ": ", std::strerror(errno));
  return opened;
}

FileDescriptor OpenTrustedFile(const FileDescriptor& folder, const std::string& name,
                               std::string* fault) {
  fault->clear();
  // O_NONBLOCK: a FIFO would wait for a writer.
  FileDescriptor file(openat(folder.get(), name.c_str(),
                             O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (!file.is_open()) {
    if (errno == ELOOP) {
      *fault = StrCat(name, " is a symbolic link");
    } else if (errno != ENOENT) {
      *fault = StrCat(name, ": ", std::strerror(errno));
    }
    return file;
  }
  struct stat info;
  if (fstat(file.get(), &info) != 0) {
    *fault = StrCat(name, ": ", std::strerror(errno));
  } else if (!S_ISREG(info.st_mode)) {
    *fault = StrCat(name, " is not a regular file");
  } else {
    *fault = Distrust(name, info, false);
  }
  return fault->empty() ? std::move(file) : FileDescriptor();
}

std::string ReadFile(const FileDescriptor& file, int64_t max_bytes) {
  struct stat info;
  if (fstat(file.get(), &info) != 0 || info.st_size > max_bytes) return "";
  std::string bytes(info.st_size, '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = read(file.get(), bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return "";
    done += n;
  }
  return bytes;
}

bool WriteNewFile(const FileDescriptor& folder, const std::string& name, std::string_view bytes,
                  mode_t mode) {
  FileDescriptor file(openat(folder.get(), name.c_str(),
                             O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
  if (!file.is_open() || fchmod(file.get(), mode) != 0) return false;
  while (!bytes.empty()) {
    const ssize_t n = write(file.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(n);
  }
  return file.Close();
}

}  // namespace jax_fp8gemm
