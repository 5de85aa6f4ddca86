// The FFI attribute `config`: a dictionary with one 32-bit integer for each member of a struct.
//
// XLA's decoding of structs searches the dictionary anew for each member: 0.8 us for a GemmConfig,
// in Prepare and in Execute of every call. XLA keeps dictionaries sorted by name, so a list of the
// members in that order is compared name by name.

#ifndef JAX_FP8GEMM_CONFIG_ATTRIBUTE_H_
#define JAX_FP8GEMM_CONFIG_ATTRIBUTE_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

#include "members.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

template <typename Config>
struct ConfigField {
  std::string_view name;
  int32_t Config::* member;
};

// Specialised for each config, as a FieldsOf.
template <typename Config>
struct ConfigFields;

// `kAll` is the fields of a config, which are given sorted by name.
template <typename Config, int32_t Config::*... kMembers>
struct FieldsOf {
  static constexpr ConfigField<Config> kAll[] = {{MemberName<kMembers>(), kMembers}...};
};

template <typename Config>
constexpr bool AreFieldsSorted() {
  const auto& fields = ConfigFields<Config>::kAll;
  for (size_t i = 1; i < std::size(fields); ++i) {
    if (!(fields[i - 1].name < fields[i].name)) return false;
  }
  return true;
}

// What FFI_DECODE_CONFIG makes of xla::ffi::AttrDecoding.
template <typename Config>
struct ConfigDecoding {
  using Type = Config;

  static std::optional<Config> Decode(XLA_FFI_AttrType type, void* attribute,
                                      xla::ffi::DiagnosticEngine& diagnostic) {
    constexpr const auto& kFields = ConfigFields<Config>::kAll;
    static_assert(AreFieldsSorted<Config>());
    static_assert(sizeof(Config) == std::size(kFields) * sizeof(int32_t), "a field is missing");
    const auto* attributes = static_cast<const XLA_FFI_Attrs*>(attribute);
    constexpr int64_t kNumFields = std::size(kFields);
    if (type != XLA_FFI_AttrType_DICTIONARY || attributes->size != kNumFields) {
      return diagnostic.Emit("config must be a dictionary of ") << kNumFields << " integers";
    }
    Config config = {};
    for (size_t i = 0; i < std::size(kFields); ++i) {
      const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attributes->attrs[i]);
      const XLA_FFI_ByteSpan& name = *attributes->names[i];
      const std::string_view actual(name.ptr, name.len);
      if (actual != kFields[i].name || attributes->types[i] != XLA_FFI_AttrType_SCALAR ||
          scalar->dtype != XLA_FFI_DataType_S32) {
        return diagnostic.Emit("config must have an i32 ") << kFields[i].name << "; got " << actual;
      }
      config.*kFields[i].member = *static_cast<const int32_t*>(scalar->value);
    }
    return config;
  }
};

}  // namespace jax_fp8gemm

// Lets handlers take attributes of the type jax_fp8gemm::Config. Outside of any namespace.
#define FFI_DECODE_CONFIG(Config)                    \
  template <>                                        \
  struct xla::ffi::AttrDecoding<jax_fp8gemm::Config> \
      : jax_fp8gemm::ConfigDecoding<jax_fp8gemm::Config> {}

#endif  // JAX_FP8GEMM_CONFIG_ATTRIBUTE_H_
