// Error returns and message text shared by the FFI handlers.

#ifndef JAX_FP8GEMM_ERRORS_H_
#define JAX_FP8GEMM_ERRORS_H_

#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "utf8.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

namespace ffi = xla::ffi;

// Appends anything that can be written to a stream; a stream costs microseconds, so text and
// integers go without: names of kernels are put together in every call.
template <typename T>
void Append(std::string& text, const T& value) {
  if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    text += std::string_view(value);
  } else if constexpr (std::is_integral_v<T> && sizeof(T) > 1) {
    text += std::to_string(value);
  } else {
    std::ostringstream out;
    out << value;
    text += out.str();
  }
}

template <typename... Args>
std::string StrCat(const Args&... args) {
  std::string text;
  (Append(text, args), ...);
  return text;
}

// A failed ffi::Error on its way out of a function: converts to ffi::Error and to any ffi::ErrorOr,
// so that the macros below work in functions that return either.
class Failure {
 public:
  explicit Failure(ffi::Error error) : error_(std::move(error)) {}
  operator ffi::Error() && { return std::move(error_); }  // NOLINT
  template <typename T>
  operator ffi::ErrorOr<T>() && {  // NOLINT
    return ffi::ErrorOr<T>(ffi::Unexpected<ffi::Error>(std::move(error_)));
  }

 private:
  ffi::Error error_;
};

// Makes failures of one code: called with the pieces of the message.
template <ffi::ErrorCode kCode>
struct FailureOf {
  template <typename... Args>
  Failure operator()(const Args&... args) const {
    return Failure(ffi::Error(kCode, Utf8(StrCat(args...))));
  }
};

// The caller broke a rule of the operation: "<op>: <what must hold>; got <...>. <what to do>".
inline constexpr FailureOf<ffi::ErrorCode::kInvalidArgument> InvalidArgument;

// This machine cannot do it: no GPU, old driver, no NVRTC.
inline constexpr FailureOf<ffi::ErrorCode::kFailedPrecondition> FailedPrecondition;

// CUDA, NVRTC or this library failed.
inline constexpr FailureOf<ffi::ErrorCode::kInternal> Internal;

// The kernel is not in memory; compiling it helps.
inline constexpr FailureOf<ffi::ErrorCode::kNotFound> NotFound;

// Runs `body`, which returns ffi::Error or ffi::ErrorOr, and turns an exception into an error:
// an exception that leaves a handler would end the process. Every handler body goes through it.
template <typename Body>
auto NoThrow(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& e) {
    return Internal("jax_fp8gemm: unexpected exception: ", e.what());
  } catch (...) {
    return Internal("jax_fp8gemm: unexpected exception of unknown type");
  }
}

// JAX's short name of a dtype: "bf16", "f8e4m3fn".
inline const char* ShortType(ffi::DataType type) {
  using T = ffi::DataType;
  constexpr std::pair<T, const char*> kNames[] = {
      {T::F8E4M3FN, "f8e4m3fn"}, {T::F8E5M2, "f8e5m2"}, {T::BF16, "bf16"}, {T::F16, "f16"},
      {T::F32, "f32"},           {T::F64, "f64"},       {T::S32, "i32"}};
  for (const auto& [named, name] : kNames) {
    if (named == type) return name;
  }
  return "other";
}

// JAX's short type of a buffer: "f8e4m3fn[4096,7168]". Pass `*result` for a result.
inline std::string ShapeText(const ffi::AnyBuffer& buffer) {
  std::string text = StrCat(ShortType(buffer.element_type()), "[");
  const char* separator = "";
  for (int64_t dim : buffer.dimensions()) {
    text += StrCat(separator, dim);
    separator = ",";
  }
  return text + "]";
}

}  // namespace jax_fp8gemm

// Returns from the enclosing function if `expr`, an ffi::Error, is a failure.
#define FFI_RETURN_IF_ERROR(expr)                       \
  do {                                                  \
    ::xla::ffi::Error error_ = (expr);                  \
    if (error_.failure()) {                             \
      return ::jax_fp8gemm::Failure(std::move(error_)); \
    }                                                   \
  } while (false)

#define FFI_CONCAT_INNER_(a, b) a##b
#define FFI_CONCAT_(a, b) FFI_CONCAT_INNER_(a, b)
#define FFI_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr)         \
  auto result = (expr);                                       \
  if (result.has_error()) {                                   \
    return ::jax_fp8gemm::Failure(std::move(result).error()); \
  }                                                           \
  lhs = std::move(*result)

// Assigns the value of `expr`, an ffi::ErrorOr, to `lhs` (a declaration or a variable), or returns
// its error. Two statements: not for the body of an `if` without braces.
#define FFI_ASSIGN_OR_RETURN(lhs, expr) \
  FFI_ASSIGN_OR_RETURN_IMPL_(FFI_CONCAT_(result_or_, __LINE__), lhs, expr)

// Returns an Internal error with the expression, file:line and the driver's words if `expr`, a
// CUresult, is not CUDA_SUCCESS. Needs driver/driver.h.
#define CU_RETURN_IF_ERROR(expr)                                           \
  do {                                                                     \
    ::jax_fp8gemm::CUresult result_ = (expr);                              \
    if (result_ != ::jax_fp8gemm::CUDA_SUCCESS) {                          \
      return ::jax_fp8gemm::Failure(                                       \
          ::jax_fp8gemm::DriverError(#expr, __FILE__, __LINE__, result_)); \
    }                                                                      \
  } while (false)

#endif  // JAX_FP8GEMM_ERRORS_H_
