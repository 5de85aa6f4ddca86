// The kernel of a config: compiled, loaded and found, in the same way for every operation.
//
// A config is a struct of 32-bit integers (config_attribute.h) with these functions in its
// namespace:
//   ffi::Error CheckConfig(const Config&)         an error if no kernel can be built from it
//   std::string KernelName(const Config&)         the kernel's symbol
//   KernelSource MakeKernelSource(const Config&)  its translation unit
//   int64_t DynamicSmemBytes(const Config&)       dynamic shared memory of a CTA

#ifndef JAX_FP8GEMM_JIT_CONFIG_KERNEL_H_
#define JAX_FP8GEMM_JIT_CONFIG_KERNEL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "driver/driver.h"
#include "errors.h"
#include "jit/jit.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// The kernel of a config on the device of the current context. A kernel that this thread got lately
// costs neither a lock nor its name, which takes 0.3 us to put together.
template <typename Config>
ffi::ErrorOr<CUkernel> GetKernel(const Config& config) {
  static_assert(std::has_unique_object_representations_v<Config>, "configs are compared by bytes");
  struct Found {
    Config config;
    CUdevice device;
    uint64_t generation;
    CUkernel kernel;
  };
  thread_local std::array<Found, 16> lately = {};
  thread_local size_t oldest = 0;
  FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
  FFI_ASSIGN_OR_RETURN(const CUdevice device, CurrentDevice(*driver));
  const uint64_t generation = JitGeneration();
  for (const Found& found : lately) {
    if (found.kernel != nullptr && found.device == device && found.generation == generation &&
        std::memcmp(&found.config, &config, sizeof(Config)) == 0) {
      return found.kernel;
    }
  }
  FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(KernelName(config), DynamicSmemBytes(config)));
  lately[oldest] = {config, device, generation, kernel};
  oldest = (oldest + 1) % lately.size();
  return kernel;
}

// Compiles the kernel of a config, unless memory or the disk cache has it.
template <typename Config>
ffi::Error CompileKernel(const Config& config) {
  FFI_ASSIGN_OR_RETURN([[maybe_unused]] auto cubin, GetOrCompile(MakeKernelSource(config)));
  return ffi::Error::Success();
}

// What the Instantiate handler of every operation does. `Attributes`: the types of the call's
// attributes behind `config`, which the kernel does not depend on.
template <typename Config, typename... Attributes>
ffi::Error Instantiate(Config config, Attributes...) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    return CompileKernel(config);
  });
}

// What the Prepare handler of every operation does: loads the kernel into the current device. It
// compiles the kernel too if it is not in memory: XLA (jaxlib 0.11.2) instantiates nothing of an
// executable that JAX's compilation cache kept. Any other error is reported as it is: a second try
// would hide what the driver said first.
template <typename Config, typename... Attributes>
ffi::Error Prepare(ffi::RemainingArgs, ffi::RemainingRets, Config config, Attributes...) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    ffi::ErrorOr<CUkernel> kernel = GetKernel(config);
    if (kernel.has_error() && kernel.error().errc() == ffi::ErrorCode::kNotFound) {
      FFI_RETURN_IF_ERROR(CompileKernel(config));
      kernel = GetKernel(config);
    }
    return kernel.has_error() ? kernel.error() : ffi::Error::Success();
  });
}

// Return the bindings of these handlers. The caller adds the attributes behind `config`.
template <typename Config>
auto BindInstantiate() {
  return ffi::Ffi::BindInstantiate().Attr<Config>("config");
}

template <typename Config>
auto BindPrepare() {
  return ffi::Ffi::BindPrepare().RemainingArgs().RemainingRets().template Attr<Config>("config");
}

}  // namespace jax_fp8gemm

// Defines the handlers of an operation whose config is its only attribute. `binding` is that of the
// function Execute; command buffers may capture it.
#define FFI_DEFINE_HANDLERS(Operation, Config, binding)                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Operation##InstantiateHandler, Instantiate<Config>, \
                                BindInstantiate<Config>());                         \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Operation##PrepareHandler, Prepare<Config>,         \
                                BindPrepare<Config>());                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Operation##ExecuteHandler, Execute, binding,        \
                                {ffi::Traits::kCmdBufferCompatible})

#endif  // JAX_FP8GEMM_JIT_CONFIG_KERNEL_H_
