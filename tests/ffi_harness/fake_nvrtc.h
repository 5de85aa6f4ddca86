// An NVRTC that compiles nothing: what the harness can tell it, and what it has seen.
//
// Its "cubin" of a program is the text that driver_rules.h reads, and depends on the program alone.
// A program must include a header that it was created with. All functions are thread-safe.

#ifndef JAX_FP8GEMM_TESTS_FAKE_NVRTC_H_
#define JAX_FP8GEMM_TESTS_FAKE_NVRTC_H_

#include <string>

namespace fake {

// The library's own path.
std::string NvrtcPath();

// How long a compilation takes.
void SetCompileMicroseconds(int microseconds);

// Compilations of a kernel so far.
long NumCompilations(const std::string& kernel);

// Programs that were created and not destroyed.
long NumPrograms();

long NumNvrtcCalls();

// Lets the nth call from now on, 1 being the next, fail. 0: none will.
void FailNvrtcCall(long nth);

// The function that FailNvrtcCall has made fail since; "" if none.
std::string FailedNvrtcCall();

}  // namespace fake

#endif  // JAX_FP8GEMM_TESTS_FAKE_NVRTC_H_
