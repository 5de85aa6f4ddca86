// Runs the stages of a call and judges what they did.

#ifndef JAX_FP8GEMM_TESTS_CALLS_H_
#define JAX_FP8GEMM_TESTS_CALLS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "cases.h"
#include "crash_report.h"
#include "fake_driver.h"

namespace harness {

// What became of a call: the error of the first stage that failed, or the device's work.
struct Outcome {
  std::optional<Error> error;
  std::string stage;  // of the error
  fake::Work work;
};

// Instantiate, Prepare and Execute on this thread's device, up to the first that fails. XLA may
// leave Instantiate out.
Outcome RunStages(const Case& c, bool with_instantiate = true);
Outcome RunExecute(const Case& c);

// The device of this thread, in the driver and in the calls.
void UseDevice(int device);

// Requires that the driver refused nothing, that no error is left over, and that an error is a
// sentence or the device's work is what the call says.
void RequireGood(const Case& c, const Outcome& outcome);

// The same, and that the call succeeded.
void RequireSuccess(const Case& c, const Outcome& outcome);

// "", or what is missing of a sentence.
std::string SentenceFault(const Error& error);

// The folder of what kernels include; before any call.
void UseSources(const std::string& folder);

// Empties the memory of the JIT: the next call compiles or reads from disk, and loads.
void Reconfigure(const std::string& cache_dir = "", const std::string& dump_dir = "");

}  // namespace harness

#endif  // JAX_FP8GEMM_TESTS_CALLS_H_
