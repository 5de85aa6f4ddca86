// What the harness can do. Each command ends the process with a sentence if something is wrong.

#ifndef JAX_FP8GEMM_TESTS_COMMANDS_H_
#define JAX_FP8GEMM_TESTS_COMMANDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cases.h"

namespace harness {

// `num_calls` calls with random operands; half of them have something wrong.
void RunRandomCalls(uint64_t seed, long num_calls, const ConfigLists& lists,
                    const std::string& cache_dir);

// `num_configs` configs with random members: each is refused in a sentence, or its kernel is
// launched as a driver allows.
void RunRandomConfigs(uint64_t seed, long num_configs, const ConfigLists& lists);

// `num_maps` tensor maps: EncodeTensorMap2D refuses what a driver would refuse, and nothing else.
void RunTensorMaps(uint64_t seed, long num_maps);

// Every call of the driver and of NVRTC fails once in every case: the error of a driver call is
// reported, an error is a sentence, none is left over, and the next call succeeds.
void RunFaults(const std::vector<Case>& cases);

// The same where the driver is opened, which happens once in a process: its nth call fails. Prints
// the function that failed.
void RunOpening(const std::vector<Case>& cases, long nth);

// A process forks while another of its threads opens the driver. The child makes the call.
void RunFork(const Case& c);

// Threads share one cache, each on a device of its own.
void RunThreads(uint64_t seed, int num_threads, long num_calls, const ConfigLists& lists,
                const std::string& cache_dir);

// Prints the device's work of every case, as JSON.
void RecordLaunches(const std::vector<Case>& cases);

}  // namespace harness

#endif  // JAX_FP8GEMM_TESTS_COMMANDS_H_
