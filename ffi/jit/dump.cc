#include "jit/dump.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <vector>

#include "errors.h"
#include "jit/trusted_folder.h"

extern char** environ;

namespace jax_fp8gemm {
namespace {

constexpr mode_t kMode = 0644;

// Makes way for a new file: nothing is written through a link, or to a FIFO.
void Remove(const FileDescriptor& folder, const std::string& name) {
  unlinkat(folder.get(), name.c_str(), 0);
}

bool WriteText(const FileDescriptor& folder, const std::string& name, std::string_view text) {
  Remove(folder, name);
  return WriteNewFile(folder, name, text, kMode);
}

// Runs a program found on PATH with its output in a new file. False if it cannot run or fails.
bool RunTool(std::vector<std::string> command, const FileDescriptor& folder,
             const std::string& name) {
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  Remove(folder, name);
  const FileDescriptor output(openat(folder.get(), name.c_str(),
                                     O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kMode));
  if (!output.is_open()) return false;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output.get(), STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t pid;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return false;
  int status = 0;
  pid_t ended;
  do {
    ended = waitpid(pid, &status, 0);
  } while (ended < 0 && errno == EINTR);
  return ended == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

std::string DumpKernel(const std::string& dump_dir, const KernelSource& source,
                       const Cubin& cubin) {
  std::error_code ignored;  // opening it tells what is wrong
  std::filesystem::create_directories(dump_dir, ignored);
  const FileDescriptor folder(
      open(dump_dir.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder.is_open()) {
    return StrCat("cannot write in ", dump_dir,
                  ", which must be a folder and no symbolic link: ", std::strerror(errno));
  }
  const std::string base = StrCat(dump_dir, "/", source.name);
  if (!WriteText(folder, source.name + ".cu", source.text) ||
      !WriteText(folder, source.name + ".log", cubin.log) ||
      !WriteText(folder, source.name + ".cubin", {cubin.image.data(), cubin.image.size()})) {
    return StrCat("cannot write ", base, ".*: ", std::strerror(errno));
  }
  const std::string sass = source.name + ".sass";
  if (!RunTool({"nvdisasm", "-c", base + ".cubin"}, folder, sass) &&
      !RunTool({"cuobjdump", "-sass", base + ".cubin"}, folder, sass)) {
    Remove(folder, sass);
  }
  return "";
}

}  // namespace jax_fp8gemm
