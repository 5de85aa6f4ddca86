#include <cstdio>
#include <map>

#include "calls.h"
#include "commands.h"
#include "mutations.h"

namespace harness {
namespace {

// How often each call is made, and how the calls ended.
class Tally {
 public:
  void Add(const Outcome& outcome) {
    if (!outcome.error) {
      ++num_successes_;
      return;
    }
    // Errors that differ in numbers only are one kind.
    std::string kind;
    for (char character : outcome.error->message) {
      if (character < '0' || character > '9') kind += character;
    }
    ++kinds_[kind.substr(0, 60)];
  }
  void Print(const char* what) const {
    long num_errors = 0;
    for (const auto& [kind, count] : kinds_) num_errors += count;
    std::printf("%s: %ld succeeded, %ld failed with %zu kinds of errors\n", what, num_successes_,
                num_errors, kinds_.size());
  }

 private:
  long num_successes_ = 0;
  std::map<std::string, long> kinds_;
};

// Whether a quantiser, or what copies or adds rows, has nothing to do.
bool IsEmpty(const Case& c) {
  const auto has_nothing = [&](const char* name) {
    const Buffer* buffer = c.Find(name);
    return buffer != nullptr && buffer->Bytes() == 0;
  };
  if (c.op == &kCopyRows) return has_nothing("x") || has_nothing("places") || has_nothing("values");
  if (c.op == &kSumRows) return has_nothing("sums");
  const Buffer* rows = c.Find("rows");
  return c.op == &kQuantize && !c.args.empty() &&
         (c.args[0].Bytes() == 0 || (rows != nullptr && rows->Bytes() == 0));
}

void RunMutated(Random& random, const ConfigLists& lists, Tally& tally) {
  Case c = LegalCase(random, lists);
  Mutate(random, c);
  c.is_empty = IsEmpty(c);
  // XLA prepares what it executes; a handler must not rely on it.
  const Outcome outcome = random.Chance(0.1) ? RunExecute(c) : RunStages(c, !random.Chance(0.1));
  RequireGood(c, outcome);
  tally.Add(outcome);
}

// More tiles than the kernel counts in 32 bits, of a call whose extents are all in their limits.
void RunBeyondLimits() {
  constexpr int64_t k = int64_t{1} << 30, g = 1024, columns = 127 * g / 128 * 128;
  Case c = {};
  c.op = &kQuantize;
  c.attributes.config = {{"activation", 0}, {"alpha", 0},  {"e5m2", 0},     {"input", 0},
                         {"limit", 0},      {"mode", 1},   {"padded", 0},   {"pow2_scale", 0},
                         {"ragged", 1},     {"source", 0}, {"up_offset", 0}};
  c.args = {{"x", XLA_FFI_DataType_BF16, {1, k}, 0},
            {"group_sizes", XLA_FFI_DataType_S32, {g}, 0},
            {"first_row", XLA_FFI_DataType_S32, {1}, 0}};
  c.rets = {{"transposed", XLA_FFI_DataType_F8E4M3FN, {k, columns}, 0},
            {"transposed_scale", XLA_FFI_DataType_F32, {k, columns / 128}, 0}};
  PlaceBuffers(c);
  const Outcome outcome = RunStages(c);
  RequireGood(c, outcome);
  Require(outcome.error ? "" : "must be refused", c);
}

// No context, and a device with a number above those that the JIT keeps.
void RunOddDevices(Random& random, const ConfigLists& lists) {
  Case c = LegalCase(random, lists);
  while (c.is_empty) c = LegalCase(random, lists);
  for (int device : {-1, 70}) {
    UseDevice(device);
    const Outcome outcome = RunStages(c);
    RequireGood(c, outcome);
    Require(outcome.error ? "" : "a call must fail without a device", c);
  }
  UseDevice(0);
}

}  // namespace

void RunRandomCalls(uint64_t seed, long num_calls, const ConfigLists& lists,
                    const std::string& cache_dir) {
  Random random(seed);
  fake::SetDeviceCount(72);
  Reconfigure(cache_dir);
  RunOddDevices(random, lists);
  RunBeyondLimits();
  Tally legal, mutated;
  for (long i = 0; i < num_calls; ++i) {
    // From time to time all is read from disk, or compiled anew and not kept.
    if (i % 500 == 499) Reconfigure(random.Chance(0.5) ? cache_dir : "");
    UseDevice(random.PickOf({0, 0, 1, 63}));
    if (i % 2 == 0) {
      const Case c = LegalCase(random, lists);
      const Outcome outcome = RunStages(c, !random.Chance(0.1));
      RequireSuccess(c, outcome);
      legal.Add(outcome);
    } else {
      RunMutated(random, lists, mutated);
    }
  }
  legal.Print("legal calls");
  mutated.Print("calls with something wrong");
}

namespace {

// All members become anything, or a few, or a few of the tile something that it could have: only
// then are most of the rules reached.
void MutateConfig(Random& random, Config& config) {
  const double kind = random.Below(100);
  const uint64_t num_changes = kind < 10 ? config.size() : 1 + random.Below(3);
  for (uint64_t change = 0; change < num_changes; ++change) {
    auto& [name, value] = config[kind < 10 ? change : random.Below(config.size())];
    const bool is_extent = name.rfind("block_", 0) == 0 || name == "sub_n";
    if (kind < 50) {
      value = AnyInt32(random);
    } else if (name.rfind("num_", 0) == 0 || is_extent) {
      value = is_extent ? 8 * (1 + random.Below(32)) : random.Below(name == "num_sms" ? 200 : 12);
    }
  }
}

}  // namespace

void RunRandomConfigs(uint64_t seed, long num_configs, const ConfigLists& lists) {
  Random random(seed);
  Reconfigure();
  Tally tally;
  for (long i = 0; i < num_configs; ++i) {
    if (i % 1000 == 999) Reconfigure();
    // The shape is the original's: what a config is does not depend on its operands.
    Case c = LegalCase(random, lists);
    MutateConfig(random, c.attributes.config);
    const Outcome outcome = random.Chance(0.5) ? RunStages(c) : RunExecute(c);
    RequireGood(c, outcome);
    tally.Add(outcome);
  }
  tally.Print("random configs");
}

}  // namespace harness
