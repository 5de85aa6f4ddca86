// Members of a struct by name, each named once.

#ifndef JAX_FP8GEMM_MEMBERS_H_
#define JAX_FP8GEMM_MEMBERS_H_

#include <string>
#include <string_view>
#include <type_traits>

namespace jax_fp8gemm {

// The name of a member: MemberName<&Driver::cuInit>() is "cuInit". It is cut out of the text that
// GCC and clang have for this function, so what follows it is no zero byte.
template <auto kMember>
constexpr std::string_view MemberName() {
  constexpr auto is_of_name = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  // "... [with auto kMember = &jax_fp8gemm::Driver::cuInit; ...]", of clang without "with" and
  // without what follows the semicolon.
  constexpr std::string_view text = __PRETTY_FUNCTION__;
  size_t end = text.find_first_of(";]", text.rfind('&'));
  while (!is_of_name(text[end - 1])) --end;
  size_t begin = end;
  while (is_of_name(text[begin - 1])) --begin;
  return text.substr(begin, end - begin);
}

// Sets members that are pointers to functions to what find(name), a void*, returns for the name of
// each. Returns the name of the last one for which it returned nullptr, or "".
template <auto... kFunctions, typename Struct, typename Find>
std::string SetFunctions(Struct& object, const Find& find) {
  std::string missing;
  const auto set = [&](auto& function, const std::string& name) {
    void* address = find(name.c_str());
    if (address == nullptr) missing = name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  (set(object.*kFunctions, std::string(MemberName<kFunctions>())), ...);
  return missing;
}

// What these functions need of a compiler.
struct NamedMembers {
  int field_1;
  int (*function)(const char* text, int (&numbers)[2]);
};
static_assert(MemberName<&NamedMembers::field_1>() == "field_1");
static_assert(MemberName<&NamedMembers::function>() == "function");

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_MEMBERS_H_
