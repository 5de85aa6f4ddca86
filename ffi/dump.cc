#include "dump.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "errors.h"

extern char** environ;

namespace jax_fp8gemm {
namespace {

namespace fs = std::filesystem;

bool WriteText(const fs::path& path, const char* data, size_t bytes) {
  std::ofstream stream(path, std::ios::binary);
  return static_cast<bool>(stream.write(data, bytes).flush());
}

// Runs a program found on PATH with its output in `output`. False if it cannot run or fails.
bool RunTool(std::vector<std::string> command, const fs::path& output) {
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0666);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t pid;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  return error == 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

}  // namespace

std::string DumpKernel(const std::string& dump_dir, const KernelSource& source,
                       const Cubin& cubin) {
  std::error_code error;
  fs::create_directories(dump_dir, error);
  const fs::path base = fs::path(dump_dir) / source.name;
  auto with = [&](const char* extension) { return fs::path(base.string() + extension); };
  if (!WriteText(with(".cu"), source.text.data(), source.text.size()) ||
      !WriteText(with(".log"), cubin.log.data(), cubin.log.size()) ||
      !WriteText(with(".cubin"), cubin.image.data(), cubin.image.size())) {
    return StrCat("cannot write ", base.string(), ".*");
  }
  if (!RunTool({"nvdisasm", "-c", with(".cubin").string()}, with(".sass")) &&
      !RunTool({"cuobjdump", "-sass", with(".cubin").string()}, with(".sass"))) {
    fs::remove(with(".sass"), error);
  }
  return "";
}

}  // namespace jax_fp8gemm
