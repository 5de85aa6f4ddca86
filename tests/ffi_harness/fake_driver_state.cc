#include "fake_driver_state.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

namespace fake {
namespace {

int InitialDeviceCount() {
  const char* count = std::getenv("FAKE_CUDA_DEVICES");
  return count != nullptr ? std::atoi(count) : 2;
}

std::atomic<int> num_devices{InitialDeviceCount()};
std::atomic<long> num_calls{0}, calls_to_failure{0};
std::atomic<int> failure{0};
std::atomic<int> init_milliseconds{0};
std::atomic<bool> is_in_init{false};
thread_local int current_device = 0;
thread_local Work current_work;

}  // namespace

State& GetState() {
  static State& state = *new State();
  return state;
}

int Enter(const char* name) {
  ++num_calls;
  if (calls_to_failure == 0 || --calls_to_failure != 0) return kSuccess;
  std::lock_guard<std::mutex> lock(GetState().mutex);
  GetState().failed_call = name;
  return failure;
}

void WaitInInit() {
  const std::chrono::milliseconds delay(init_milliseconds.exchange(0));
  if (delay.count() == 0) return;
  is_in_init = true;
  std::this_thread::sleep_for(delay);
  is_in_init = false;
}

int Refuse(const std::string& reason, int error) {
  std::lock_guard<std::mutex> lock(GetState().mutex);
  GetState().refusals.push_back(reason);
  return error;
}

Kernel* FindKernel(const void* handle) {
  std::lock_guard<std::mutex> lock(GetState().mutex);
  const auto& kernels = GetState().kernels;
  const auto found = kernels.find(static_cast<Kernel*>(const_cast<void*>(handle)));
  return found == kernels.end() ? nullptr : *found;
}

bool IsDevice(int device) { return 0 <= device && device < num_devices; }

int CurrentDevice() { return current_device; }

Work& CurrentWork() { return current_work; }

Work TakeWork() { return std::exchange(current_work, {}); }

void SetDeviceCount(int count) { num_devices = count; }

void SetDevice(int device) { current_device = device; }

void* StreamOf(int device) { return reinterpret_cast<void*>(uintptr_t{0x1000} + 16 * device); }

void DelayInit(int milliseconds) { init_milliseconds = milliseconds; }

bool IsInInit() { return is_in_init; }

long NumCalls() { return num_calls; }

void FailCall(long nth, int error) {
  {
    std::lock_guard<std::mutex> lock(GetState().mutex);
    GetState().failed_call.clear();
  }
  failure = error;
  calls_to_failure = nth;
}

std::string FailedCall() {
  std::lock_guard<std::mutex> lock(GetState().mutex);
  return GetState().failed_call;
}

long NumLoads(const std::string& kernel) {
  std::lock_guard<std::mutex> lock(GetState().mutex);
  return GetState().loads[kernel];
}

std::vector<std::string> TakeRefusals() {
  std::lock_guard<std::mutex> lock(GetState().mutex);
  return std::exchange(GetState().refusals, {});
}

}  // namespace fake
