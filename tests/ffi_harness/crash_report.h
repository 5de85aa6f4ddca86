// Says which call a process died in.

#ifndef JAX_FP8GEMM_TESTS_CRASH_REPORT_H_
#define JAX_FP8GEMM_TESTS_CRASH_REPORT_H_

#include <string>

#include "cases.h"

namespace harness {

// From now on, prints the case that this thread has noted if a signal or a sanitizer ends the
// process. `context`: the command and its seed.
void ReportCrashes(const std::string& context);

// Notes a case as long as it lives.
class NotedCase {
 public:
  explicit NotedCase(const Case& c);
  NotedCase(const NotedCase&) = delete;
  ~NotedCase();

 private:
  const Case* before_;
};

// Ends the process with a sentence, the context and the case unless `fault` is empty.
void Require(const std::string& fault, const Case& c);

}  // namespace harness

#endif  // JAX_FP8GEMM_TESTS_CRASH_REPORT_H_
