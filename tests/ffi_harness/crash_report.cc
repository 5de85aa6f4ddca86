#include "crash_report.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <utility>

extern "C" {
// Of AddressSanitizer and ThreadSanitizer, where the harness is built with one: they catch most
// signals themselves.
void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));
// UndefinedBehaviorSanitizer asks for its options; it has no callback, but can raise SIGABRT.
const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
}

namespace harness {
namespace {

thread_local const Case* noted = nullptr;
std::string& Context() {
  static std::string& context = *new std::string();
  return context;
}

void PrintNotedCase() {
  const std::string text = noted == nullptr ? "no call" : Describe(*noted);
  std::fprintf(stderr, "\n%s: died in %s\n", Context().c_str(), text.c_str());
}

void DieOfSignal(int signal) {
  PrintNotedCase();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

void ReportCrashes(const std::string& context) {
  Context() = context;
  std::signal(SIGABRT, DieOfSignal);
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(PrintNotedCase);
  } else {
    for (int signal : {SIGFPE, SIGSEGV, SIGILL, SIGBUS}) std::signal(signal, DieOfSignal);
  }
}

NotedCase::NotedCase(const Case& c) : before_(std::exchange(noted, &c)) {}

NotedCase::~NotedCase() { noted = before_; }

void Require(const std::string& fault, const Case& c) {
  if (fault.empty()) return;
  std::fprintf(stderr, "%s: %s\n  in %s\n", Context().c_str(), fault.c_str(), Describe(c).c_str());
  std::exit(1);
}

}  // namespace harness
