#include "nvrtc_turn.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace jax_fp8gemm {
namespace {

struct Turns {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_taken = false;
  bool has_ended = false;
  int num_forks = 0;  // that wait for the turn, or are under way
};

// Never destroyed: threads may ask for a turn until the process ends. Made when the library is
// loaded: the guard of a local static could be taken by another thread at a fork.
std::atomic<Turns*> turns_of_process{new Turns()};

void BeforeFork() {
  Turns& turns = *turns_of_process;
  std::unique_lock<std::mutex> lock(turns.mutex);
  ++turns.num_forks;
  turns.changed.wait(lock, [&] { return !turns.is_taken; });
}

void InParent() {
  Turns& turns = *turns_of_process;
  std::lock_guard<std::mutex> lock(turns.mutex);
  --turns.num_forks;
  turns.changed.notify_all();
}

// The threads that the old mutex knows of are not in the child.
void InChild() { turns_of_process = new Turns(); }

[[maybe_unused]] const int registered = pthread_atfork(BeforeFork, InParent, InChild);

}  // namespace

NvrtcTurn::NvrtcTurn() {
  Turns& turns = *turns_of_process;
  std::unique_lock<std::mutex> lock(turns.mutex);
  turns.changed.wait(lock,
                     [&] { return turns.has_ended || (!turns.is_taken && turns.num_forks == 0); });
  is_granted_ = !turns.has_ended;
  if (is_granted_) turns.is_taken = true;
}

NvrtcTurn::~NvrtcTurn() {
  if (!is_granted_) return;
  Turns& turns = *turns_of_process;
  std::lock_guard<std::mutex> lock(turns.mutex);
  turns.is_taken = false;
  turns.changed.notify_all();
}

void EndNvrtcTurns() {
  Turns& turns = *turns_of_process;
  std::unique_lock<std::mutex> lock(turns.mutex);
  turns.has_ended = true;
  turns.changed.notify_all();
  turns.changed.wait(lock, [&] { return !turns.is_taken; });
}

}  // namespace jax_fp8gemm
