#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>

#include "calls.h"
#include "commands.h"
#include "driver/driver.h"

namespace harness {

void RunFork(const Case& c) {
  constexpr int kDelayMilliseconds = 500;
  constexpr int kMostSeconds = 20;
  Reconfigure();
  fake::DelayInit(kDelayMilliseconds);
  std::thread opener([] { static_cast<void>(jax_fp8gemm::GetDriver().has_value()); });
  while (!fake::IsInInit()) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(kMostSeconds);  // a call that waits for the thread that is not here
    RequireSuccess(c, RunStages(c));
    _exit(0);
  }
  opener.join();
  int status = 0;
  waitpid(child, &status, 0);
  Require(status == 0 ? "" : "the child must end with status 0; got " + std::to_string(status), c);
  std::printf("fork: the child's call succeeded\n");
}

}  // namespace harness
