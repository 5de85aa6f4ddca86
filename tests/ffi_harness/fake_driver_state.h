// What the entry points of the fake driver share.

#ifndef JAX_FP8GEMM_TESTS_FAKE_DRIVER_STATE_H_
#define JAX_FP8GEMM_TESTS_FAKE_DRIVER_STATE_H_

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "driver_rules.h"
#include "fake_driver.h"

namespace fake {

// Of CUresult. The fake driver has numbers of its own, so that a wrong one in ffi/driver/driver.h
// shows.
constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400,
              kNotFound = 500;

// A loaded library with its only kernel; the handles of both point here, and a function's too.
struct Kernel {
  KernelFacts facts;
  std::set<int> loaded_on;         // devices
  std::map<int, int> smem_limits;  // by device; what is not here has kDefaultSmemBytes
};

struct State {
  std::mutex mutex;  // guards all of it, and what the kernels hold
  std::set<Kernel*> kernels;
  std::map<std::string, long> loads;
  std::vector<std::string> refusals;
  std::string failed_call;
};

// Never destroyed: threads may call the driver until the process ends.
State& GetState();

// Counts a call. kSuccess, or what FailCall makes it fail with.
int Enter(const char* name);

// Takes as long as DelayInit says.
void WaitInInit();

// Remembers why a call is refused. Returns `error`.
int Refuse(const std::string& reason, int error = kInvalidValue);

// The kernel of a handle, or null if it is none.
Kernel* FindKernel(const void* handle);

bool IsDevice(int device);

// The device of this thread's context, or -1.
int CurrentDevice();

// Where this thread's launches are kept.
Work& CurrentWork();

// The entry points, as void pointers by name. Null if the fake driver has no such function.
void* DeviceFunction(const std::string& name);
void* LaunchFunction(const std::string& name);

}  // namespace fake

// Returns from an entry point whose call is made to fail.
#define FAKE_ENTER(name)                                         \
  if (const int entered_ = ::fake::Enter(name); entered_ != 0) { \
    return entered_;                                             \
  }

#endif  // JAX_FP8GEMM_TESTS_FAKE_DRIVER_STATE_H_
