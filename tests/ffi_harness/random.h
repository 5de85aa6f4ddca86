// Random choices, the same for the same seed.

#ifndef JAX_FP8GEMM_TESTS_RANDOM_H_
#define JAX_FP8GEMM_TESTS_RANDOM_H_

#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

namespace harness {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t Bits() { return engine_(); }
  uint64_t Below(uint64_t limit) { return Bits() % limit; }
  bool Chance(double probability) {
    return static_cast<double>(Bits() >> 11) * 0x1.0p-53 < probability;
  }
  // One of the choices.
  template <typename T>
  const T& Pick(const std::vector<T>& choices) {
    return choices[Below(choices.size())];
  }
  int64_t PickOf(std::initializer_list<int64_t> choices) {
    return choices.begin()[Below(choices.size())];
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace harness

#endif  // JAX_FP8GEMM_TESTS_RANDOM_H_
