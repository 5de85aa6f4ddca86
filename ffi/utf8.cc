#include "utf8.h"

#include <cstddef>
#include <cstdint>

namespace jax_fp8gemm {
namespace {

// Bytes of the character that `text` begins with; 0 if it begins with none. Unicode 15, table 3-7.
size_t CharacterBytes(std::string_view text) {
  const auto at = [&](size_t i) -> uint8_t { return i < text.size() ? text[i] : 0; };
  const uint8_t first = at(0), second = at(1);
  if (first < 0x80) return 1;
  const size_t bytes = first < 0xc2   ? 0
                       : first < 0xe0 ? 2
                       : first < 0xf0 ? 3
                       : first < 0xf5 ? 4
                                      : 0;
  for (size_t i = 1; i < bytes; ++i) {
    if (at(i) < 0x80 || at(i) > 0xbf) return 0;
  }
  // Longer than need be, a surrogate, or beyond the last character.
  const bool is_wrong = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                        (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  return is_wrong ? 0 : bytes;
}

}  // namespace

std::string Utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    if (bytes > 0) {
      valid += text.substr(0, bytes);
    } else {
      const auto byte = static_cast<uint8_t>(text[0]);
      valid += "\\x";
      valid += "0123456789abcdef"[byte >> 4];
      valid += "0123456789abcdef"[byte & 15];
    }
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return valid;
}

}  // namespace jax_fp8gemm
