#include <cstdio>
#include <set>

#include "calls.h"
#include "commands.h"
#include "fake_nvrtc.h"

namespace harness {
namespace {

constexpr int kLaunchFailure = 719;

struct Counts {
  long num_failures = 0, num_recoveries = 0;
  std::set<std::string> failed_calls;
};

void RequireNothingLeft(const Case& c) {
  Require(NumErrors() == 0 ? "" : "an error was not destroyed", c);
  Require(fake::NumPrograms() == 0 ? "" : "an NVRTC program was not destroyed", c);
}

// Runs a case in which the call `failed` was told to fail, and then once more.
void RequireErrorAndRecovery(const Case& c, const Outcome& outcome, const std::string& failed,
                             const std::string& word, Counts& counts) {
  Require(failed.empty() ? "no call was made to fail" : "", c);
  counts.failed_calls.insert(failed);
  RequireGood(c, outcome);
  if (outcome.error) {
    const bool names_it = outcome.error->message.find(word) != std::string::npos;
    Require(names_it ? "" : "an error must say " + word + "; got: " + outcome.error->message, c);
    ++counts.num_failures;
  } else {
    ++counts.num_recoveries;
  }
  RequireNothingLeft(c);
  RequireSuccess(c, RunStages(c));
  RequireNothingLeft(c);
}

void FailEachDriverCall(const Case& c, Counts& counts) {
  Reconfigure();
  const long before = fake::NumCalls();
  const Outcome whole = RunStages(c);
  RequireSuccess(c, whole);
  const long num_calls = fake::NumCalls() - before;
  const std::string kernel = whole.work.launches.empty() ? "" : whole.work.launches[0].kernel;
  for (long nth = 1; nth <= num_calls; ++nth) {
    Reconfigure();
    const long num_loads = fake::NumLoads(kernel);
    fake::FailCall(nth, kLaunchFailure);
    const Outcome outcome = RunStages(c);
    const std::string failed = fake::FailedCall();
    fake::FailCall(0, 0);
    Require(outcome.error ? "" : "the error of " + failed + " must be reported, not retried", c);
    RequireErrorAndRecovery(c, outcome, failed, failed, counts);
    Require(fake::NumLoads(kernel) == num_loads + 1
                ? ""
                : "after " + failed + " failed, a kernel must be loaded once; got " +
                      std::to_string(fake::NumLoads(kernel) - num_loads) + " times",
            c);
  }
}

void FailEachNvrtcCall(const Case& c, Counts& counts) {
  Reconfigure();
  const long before = fake::NumNvrtcCalls();
  RequireSuccess(c, RunStages(c));
  const long num_calls = fake::NumNvrtcCalls() - before;
  for (long nth = 1; nth <= num_calls; ++nth) {
    Reconfigure();
    fake::FailNvrtcCall(nth);
    const Outcome outcome = RunStages(c);
    const std::string failed = fake::FailedNvrtcCall();
    fake::FailNvrtcCall(0);
    RequireErrorAndRecovery(c, outcome, failed, "NVRTC_ERROR_FAKE", counts);
  }
}

}  // namespace

void RunOpening(const std::vector<Case>& cases, long nth) {
  static const std::set<std::string> opening_calls = {"cuGetProcAddress", "cuInit",
                                                      "cuDriverGetVersion"};
  const Case& c = cases[0];
  Reconfigure();
  fake::FailCall(nth, kLaunchFailure);
  const Outcome first = RunStages(c);
  const std::string failed = fake::FailedCall();
  RequireGood(c, first);
  if (opening_calls.count(failed) > 0) {
    Require(first.error ? "" : "must fail without a driver", c);
    const Outcome second = RunStages(c);
    Require(second.error && second.error->message == first.error->message
                ? ""
                : "the driver must give the same answer each time",
            c);
  }
  std::printf("%s\n", failed.c_str());
}

void RunFaults(const std::vector<Case>& cases) {
  // Open the driver and NVRTC: that is RunOpening's.
  Reconfigure();
  RequireSuccess(cases[0], RunStages(cases[0]));
  Counts counts;
  for (const Case& c : cases) {
    FailEachDriverCall(c, counts);
    FailEachNvrtcCall(c, counts);
  }
  std::printf("faults: %zu cases; %ld errors and %ld recoveries from %zu functions\n", cases.size(),
              counts.num_failures, counts.num_recoveries, counts.failed_calls.size());
}

}  // namespace harness
