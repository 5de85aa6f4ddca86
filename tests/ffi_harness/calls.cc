#include "calls.h"

#include <algorithm>

#include "fake_nvrtc.h"
#include "jit/jit.h"
#include "launch_checks.h"

namespace harness {
namespace {

thread_local int device = 0;
std::string& Sources() {
  static std::string& sources = *new std::string();
  return sources;
}

}  // namespace

void UseDevice(int new_device) {
  device = new_device;
  fake::SetDevice(new_device);
}

Outcome RunStages(const Case& c, bool with_instantiate) {
  const NotedCase noted(c);
  fake::TakeWork();
  Outcome outcome;
  if (with_instantiate) {
    outcome.stage = "instantiate";
    outcome.error =
        Call(c.op->instantiate, XLA_FFI_ExecutionStage_INSTANTIATE, {}, {}, c.attributes, device);
  }
  if (!outcome.error) {
    outcome.stage = "prepare";
    outcome.error =
        Call(c.op->prepare, XLA_FFI_ExecutionStage_PREPARE, c.args, c.rets, c.attributes, device);
  }
  if (!outcome.error) return RunExecute(c);
  outcome.work = fake::TakeWork();
  return outcome;
}

Outcome RunExecute(const Case& c) {
  const NotedCase noted(c);
  Outcome outcome;
  outcome.stage = "execute";
  outcome.error =
      Call(c.op->execute, XLA_FFI_ExecutionStage_EXECUTE, c.args, c.rets, c.attributes, device);
  outcome.work = fake::TakeWork();
  return outcome;
}

std::string SentenceFault(const Error& error) {
  const std::string& text = error.message;
  const bool is_text = std::all_of(text.begin(), text.end(), [](unsigned char character) {
    return character >= ' ' || character == '\n' || character == '\t';
  });
  const bool has_words = std::count(text.begin(), text.end(), ' ') >= 2;
  const bool is_planned = text.find("unexpected exception") == std::string::npos;
  if (is_text && has_words && is_planned) return "";
  return "an error must be a sentence; got: " + text;
}

void RequireGood(const Case& c, const Outcome& outcome) {
  for (const std::string& refusal : fake::TakeRefusals()) {
    Require("the driver refused: " + refusal +
                (outcome.error ? "\n  error: " + outcome.error->message : ""),
            c);
  }
  if (outcome.error) {
    Require(SentenceFault(*outcome.error), c);
    Require(outcome.work.launches.empty() ? "" : "a call that failed has launched", c);
  } else {
    Require(WorkFault(c, outcome.work), c);
  }
}

void RequireSuccess(const Case& c, const Outcome& outcome) {
  if (outcome.error) Require(outcome.stage + " failed: " + outcome.error->message, c);
  RequireGood(c, outcome);
}

void UseSources(const std::string& folder) { Sources() = folder; }

void Reconfigure(const std::string& cache_dir, const std::string& dump_dir) {
  jax_fp8gemm::Configure({Sources(), cache_dir, {fake::NvrtcPath()}, false, dump_dir});
}

}  // namespace harness
