// Calls of FFI handlers as XLA makes them: an XLA_FFI_CallFrame, and the API that it carries.

#ifndef JAX_FP8GEMM_TESTS_FRAMES_H_
#define JAX_FP8GEMM_TESTS_FRAMES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace harness {

// An operand or a result.
struct Buffer {
  std::string name;
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
  uint64_t address;  // on the device: reading it would end the process

  uint64_t Bytes() const;
};

// The attribute `config`, sorted by name as XLA sorts it.
using Config = std::vector<std::pair<std::string, int32_t>>;

// What an attribute can be instead of what it should be.
enum class AttributeFault {
  kNone,
  kInt64Member,      // the first member of config
  kNonScalarMember,  // the first member of config
  kNotDictionary,    // config
  kAbsent,           // config
  kInt64Rows,        // rows_per_group
};

struct Attributes {
  Config config;
  std::optional<int32_t> rows_per_group;
  int32_t clears_unused = 1;  // given beside rows_per_group
  AttributeFault fault = AttributeFault::kNone;
};

struct Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

// Calls `handler`. nullopt if it succeeded. The stream is the one of `device`.
std::optional<Error> Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                          const std::vector<Buffer>& args, const std::vector<Buffer>& rets,
                          const Attributes& attributes, int device);

// Whether the handler says that XLA may record it into a command buffer, and of which FFI version
// it is, "major.minor".
struct HandlerFacts {
  bool is_command_buffer_compatible;
  std::string version;
};
HandlerFacts Describe(XLA_FFI_Handler* handler);

// Errors that handlers created and nobody has destroyed.
long NumErrors();

// Bytes of an element; 0 of a token.
int64_t ElementBytes(XLA_FFI_DataType type);

}  // namespace harness

#endif  // JAX_FP8GEMM_TESTS_FRAMES_H_
