#include "jit/nvrtc_use.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace jax_fp8gemm {
namespace {

struct Uses {
  std::mutex mutex;
  std::condition_variable changed;
  int num_uses = 0;
  bool has_ended = false;
  int num_forks = 0;  // that wait for the uses, or are under way
};

// Never destroyed: threads may ask for a use until the process ends. Made when the library is
// loaded: the guard of a local static could be taken by another thread at a fork.
std::atomic<Uses*> uses_of_process{new Uses()};

void BeforeFork() {
  Uses& uses = *uses_of_process;
  std::unique_lock<std::mutex> lock(uses.mutex);
  ++uses.num_forks;
  uses.changed.wait(lock, [&] { return uses.num_uses == 0; });
}

void InParent() {
  Uses& uses = *uses_of_process;
  std::lock_guard<std::mutex> lock(uses.mutex);
  --uses.num_forks;
  uses.changed.notify_all();
}

// The threads that the old mutex knows of are not in the child.
void InChild() { uses_of_process = new Uses(); }

[[maybe_unused]] const int registered = pthread_atfork(BeforeFork, InParent, InChild);

}  // namespace

NvrtcUse::NvrtcUse() {
  Uses& uses = *uses_of_process;
  std::unique_lock<std::mutex> lock(uses.mutex);
  uses.changed.wait(lock, [&] { return uses.has_ended || uses.num_forks == 0; });
  is_granted_ = !uses.has_ended;
  if (is_granted_) ++uses.num_uses;
}

NvrtcUse::~NvrtcUse() {
  if (!is_granted_) return;
  Uses& uses = *uses_of_process;
  std::lock_guard<std::mutex> lock(uses.mutex);
  --uses.num_uses;
  uses.changed.notify_all();
}

void EndNvrtcUses() {
  Uses& uses = *uses_of_process;
  std::unique_lock<std::mutex> lock(uses.mutex);
  uses.has_ended = true;
  uses.changed.notify_all();
  uses.changed.wait(lock, [&] { return uses.num_uses == 0; });
}

}  // namespace jax_fp8gemm
