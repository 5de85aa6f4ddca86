#include <atomic>
#include <cstdio>
#include <mutex>
#include <set>
#include <thread>

#include "calls.h"
#include "commands.h"
#include "fake_nvrtc.h"
#include "jit/jit.h"

namespace harness {
namespace {

template <typename Body>
void RunInThreads(int num_threads, const Body& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&body, i] {
      UseDevice(i);
      body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// All threads want the same kernels at the same time: each is compiled and loaded once.
void ShareKernels(uint64_t seed, int num_threads, const ConfigLists& lists) {
  std::vector<Case> cases;
  Random choice(seed);
  while (cases.size() < 40) {
    cases.push_back(LegalCase(choice, lists));
    if (cases.back().is_empty) cases.pop_back();
  }
  std::mutex mutex;
  std::set<std::string> kernels;
  RunInThreads(num_threads, [&](int) {
    for (const Case& c : cases) {
      const Outcome outcome = RunStages(c);
      RequireSuccess(c, outcome);
      std::lock_guard<std::mutex> lock(mutex);
      kernels.insert(outcome.work.launches[0].kernel);
    }
  });
  for (const std::string& kernel : kernels) {
    const long compilations = fake::NumCompilations(kernel), loads = fake::NumLoads(kernel);
    // None where the cache has it from an earlier run.
    Require(compilations <= 1 && loads == 1
                ? ""
                : kernel + " must be compiled and loaded once; got " +
                      std::to_string(compilations) + " and " + std::to_string(loads),
            cases[0]);
  }
  std::printf("threads: %d shared %zu kernels\n", num_threads, kernels.size());
}

// Threads call what they like while some empty the memory or turn off the disk.
void CallAtRandom(uint64_t seed, int num_threads, long num_calls, const ConfigLists& lists,
                  const std::string& cache_dir) {
  std::atomic<long> num_forgotten{0};
  RunInThreads(num_threads, [&](int thread) {
    Random random(seed * 1000 + thread);
    for (long i = 0; i < num_calls / num_threads; ++i) {
      if (random.Chance(0.01)) {
        random.Chance(0.5) ? Reconfigure(cache_dir) : jax_fp8gemm::DisableDiskCache();
      }
      const Case c = LegalCase(random, lists);
      const Outcome outcome = RunStages(c);
      // The memory may be emptied between Prepare and Execute.
      const bool is_forgotten =
          outcome.error &&
          outcome.error->message.find("kernel must be compiled first") != std::string::npos;
      is_forgotten ? void(++num_forgotten) : RequireSuccess(c, outcome);
    }
  });
  Require(NumErrors() == 0 ? "" : "an error was not destroyed", {});
  std::printf("threads: %d made %ld calls; in %ld the memory was emptied between two stages\n",
              num_threads, num_calls / num_threads * num_threads, num_forgotten.load());
}

}  // namespace

void RunThreads(uint64_t seed, int num_threads, long num_calls, const ConfigLists& lists,
                const std::string& cache_dir) {
  fake::SetDeviceCount(num_threads);
  fake::SetCompileMicroseconds(2000);
  Reconfigure(cache_dir);
  ShareKernels(seed, num_threads, lists);
  fake::SetCompileMicroseconds(200);
  CallAtRandom(seed, num_threads, num_calls, lists, cache_dir);
}

}  // namespace harness
