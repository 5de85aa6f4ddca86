// What passes between Python and C++. For module.cc alone.

#ifndef JAX_FP8GEMM_PYTHON_H_
#define JAX_FP8GEMM_PYTHON_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "config_attribute.h"
#include "errors.h"
#include "thread_end.h"

namespace jax_fp8gemm {

namespace nb = nanobind;

// Runs `work`, which does not throw, without the GIL.
template <typename Work>
auto WithoutGil(Work&& work) {
  PyThreadState* const state = PyEval_SaveThread();
  auto result = work();
  // Where the interpreter is gone, it ends this daemon thread (Python < 3.14). Functions that throw
  // nothing lie below and would abort the process, so the thread sleeps, as from Python 3.14 on.
  SleepIfThreadEnds([](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); },
                    state);
  return result;
}

// A path as the system has it: what os.fsencode gives of str, bytes or os.PathLike.
inline std::string FsEncode(nb::handle path) {
  PyObject* object = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &object) == 0) throw nb::python_error();
  const auto bytes = nb::steal<nb::bytes>(object);
  return std::string(bytes.c_str(), bytes.size());
}

inline int32_t ParseField(std::string_view name, nb::handle value) {
  const nb::object integer = nb::steal(PyNumber_Index(value.ptr()));
  int32_t field = 0;
  if (!integer.is_valid() || !nb::try_cast(integer, field)) {
    PyErr_Clear();
    throw nb::value_error(
        StrCat("config must have an i32 ", name, "; got ", nb::repr(value).c_str()).c_str());
  }
  return field;
}

// Reads the fields of a config, strictly, as the handlers do.
template <typename Config>
Config ParseConfig(const nb::dict& dict) {
  Config config = {};
  for (const auto& [name, member] : ConfigFields<Config>::kAll) {
    const nb::str key(name.data(), name.size());
    if (!dict.contains(key)) throw nb::key_error(key.c_str());
    config.*member = ParseField(name, dict[key]);
  }
  constexpr size_t kNumFields = std::size(ConfigFields<Config>::kAll);
  if (dict.size() != kNumFields) {
    throw nb::key_error(
        StrCat("config must have ", kNumFields, " members; got ", dict.size()).c_str());
  }
  return config;
}

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_PYTHON_H_
