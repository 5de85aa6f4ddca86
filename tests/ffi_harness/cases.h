// One call of an operation: its config, operands and results.

#ifndef JAX_FP8GEMM_TESTS_CASES_H_
#define JAX_FP8GEMM_TESTS_CASES_H_

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "frames.h"
#include "random.h"

namespace harness {

// The handlers of an FFI target.
struct Op {
  const char* name;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* prepare;
  XLA_FFI_Handler* execute;
};
extern const Op kGemm, kQuantizingGemm, kGroupedGemm, kGroupedGatedGemm, kGroupedWgrad, kQuantize,
    kCopyRows, kSumRows;
// All of them.
extern const Op* const kOps[8];

struct Case {
  std::string name;
  const Op* op;
  Attributes attributes;
  std::vector<Buffer> args, rets;

  // The operand or result of this name, or null.
  const Buffer* Find(const std::string& buffer) const;
  // A member of the config; 0 if it has none of this name.
  int32_t Get(const std::string& member) const;
  // Whether nothing is to be computed, so that nothing is launched.
  bool is_empty = false;
};

// The configs that a package can ask for: lines of "gemm name=value ...", "quantize ...",
// "copy_rows ..." and "sum_rows ...".
struct ConfigLists {
  std::vector<Config> gemm, quantize, copy_rows, sum_rows;
};
ConfigLists ReadConfigLists(const std::string& path);

// The config of "name=value ..." up to the end of `line` or a "|".
Config ReadConfig(std::istream& line);

// The cases that golden_cases.py writes.
std::vector<Case> ReadCases(const std::string& path);

// A call that must succeed, of a random operation, config and shape.
Case LegalCase(Random& random, const ConfigLists& lists);

// A call that must succeed with this config. `op`: of the products, the one that ProductOf says.
Case LegalGemm(Random& random, const Config& config);
Case LegalQuantize(Random& random, const Config& config);
Case LegalCopyRows(Random& random, const Config& config);
Case LegalSumRows(Random& random, const Config& config);

// Gives every buffer an address of its own, as XLA would.
void PlaceBuffers(Case& c);

// The operation that takes the gemm config of the case.
const Op& ProductOf(const Case& c);

std::string Describe(const Case& c);

}  // namespace harness

#endif  // JAX_FP8GEMM_TESTS_CASES_H_
