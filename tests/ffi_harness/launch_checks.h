// What must hold of the device's work whatever the operands: it stays inside the buffers of the
// call, and every parameter is the buffer that its name says.

#ifndef JAX_FP8GEMM_TESTS_LAUNCH_CHECKS_H_
#define JAX_FP8GEMM_TESTS_LAUNCH_CHECKS_H_

#include <string>

#include "cases.h"
#include "fake_driver.h"

namespace harness {

// "", or what is wrong with the work of a call that succeeded.
std::string WorkFault(const Case& c, const fake::Work& work);

// The map of these 128 bytes, or null if the driver did not encode it.
const fake::TensorMap* AsTensorMap(const void* bytes);

}  // namespace harness

#endif  // JAX_FP8GEMM_TESTS_LAUNCH_CHECKS_H_
