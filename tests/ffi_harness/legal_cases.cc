// Calls that must succeed, with random shapes.

#include <algorithm>
#include <utility>

#include "cases.h"

namespace harness {
namespace {

constexpr XLA_FFI_DataType kF32 = XLA_FFI_DataType_F32, kS32 = XLA_FFI_DataType_S32,
                           kBf16 = XLA_FFI_DataType_BF16;

int64_t Blocks(int64_t x) { return (x + 127) / 128; }

XLA_FFI_DataType Fp8(int32_t is_e5m2) {
  return is_e5m2 ? XLA_FFI_DataType_F8E5M2 : XLA_FFI_DataType_F8E4M3FN;
}

// An extent around the sizes where kernels change what they do.
int64_t Extent(Random& random) {
  return random.PickOf({1,   2,   3,   7,   8,   31,   32,   33,   63,   64,   65,    127,  128,
                        129, 200, 255, 256, 257, 1000, 2112, 4096, 4097, 7168, 18432, 65536});
}

int64_t Multiple(int64_t x, int64_t of) { return (x + of - 1) / of * of; }

struct Extents {
  int64_t m, n, k;
};

// Rarely an extent at its limit of 2^30, where the others are small enough for the rest of the
// limits.
Extents ProductExtents(Random& random, bool can_have_many_rows) {
  Extents e = {Extent(random), Multiple(Extent(random), 8), Multiple(Extent(random), 16)};
  if (!random.Chance(0.05)) return e;
  e = {std::min<int64_t>(e.m, 128), std::min<int64_t>(e.n, 128), std::min<int64_t>(e.k, 128)};
  constexpr int64_t kMost = int64_t{1} << 30;
  int64_t* large[] = {&e.k, &e.n, &e.m};
  *large[random.Below(can_have_many_rows ? 3 : 1)] = kMost;
  return e;
}

int64_t Groups(Random& random) { return random.PickOf({1, 2, 3, 8, 64, 256, 1024}); }

void AddDense(Random& random, Case& c) {
  auto [m, n, k] = ProductExtents(random, true);
  if (c.Get("transpose_out")) std::swap(m, n);
  if (c.Get("cluster_k") > 1) k = std::min<int64_t>(k, 22400);  // MostSplitK
  const int64_t kb = Blocks(k), scale_rows = c.Get("is_1d1d") ? n : Blocks(n);
  // A 1d2d product has up to 7 columns more than rhs has rows.
  const bool is_1d2d = !c.Get("is_1d1d") && !c.Get("transpose_out");
  const int64_t rhs_rows = is_1d2d ? n - random.PickOf({0, 0, 1, 7}) : n;
  c.args = {{"lhs", Fp8(c.Get("lhs_e5m2")), {m, k}, 0},
            {"lhs_scale", kF32, {m, kb}, 0},
            {"rhs", Fp8(c.Get("rhs_e5m2")), {rhs_rows, k}, 0},
            {"rhs_scale", kF32, {scale_rows, kb}, 0}};
  // The rows of one operand may be padded.
  if (random.Chance(0.2)) c.args[random.PickOf({0, 2})].dims[1] = kb * 128;
  c.rets = {{"out", c.Get("out_f32") ? kF32 : kBf16, {m, n}, 0}};
  if (c.Get("transpose_out")) c.rets[0].dims = {n, m};
}

void AddQuantizing(Random& random, Case& c) {
  auto [unused, n, k] = ProductExtents(random, false);
  if (c.Get("cluster_k") > 1) k = std::min<int64_t>(k, 22400);  // MostSplitK
  const int64_t m = random.PickOf({1, 2, 3, 4, 5, 7, 8}), kb = Blocks(k);
  // lhs may end in the middle of 16 values, and rhs may be padded.
  const int64_t lhs_k = k % 128 == 0 && random.Chance(0.3) ? k - 8 : k;
  c.args = {{"lhs", kBf16, {m, lhs_k}, 0},
            {"rhs", Fp8(c.Get("rhs_e5m2")), {n - random.PickOf({0, 0, 1, 7}), k}, 0},
            {"rhs_scale", kF32, {Blocks(n), kb}, 0}};
  if (random.Chance(0.2)) c.args[1].dims[1] = kb * 128;
  c.rets = {{"out", c.Get("out_f32") ? kF32 : kBf16, {m, n}, 0}};
}

void AddGroupedRows(Random& random, Case& c) {
  auto [m, n, k] = ProductExtents(random, false);
  const int64_t g = Groups(random);
  c.attributes.rows_per_group = 0;
  c.attributes.clears_unused = random.PickOf({0, 1});
  if (random.Chance(0.4)) {
    c.attributes.rows_per_group = random.PickOf({1, 4, 8, 64, 100, 128, 256});
    c.attributes.clears_unused = random.PickOf({0, 1, 2});
    m = g * *c.attributes.rows_per_group;
    // A row of scales stays below 2^31 of them.
    k = std::min<int64_t>(k, 16384);
  }
  c.args = {{"lhs", Fp8(c.Get("lhs_e5m2")), {m, k}, 0},
            {"lhs_scale", kF32, {m, Blocks(k)}, 0},
            {"rhs", Fp8(c.Get("rhs_e5m2")), {g * n, k}, 0},
            {"rhs_scale", kF32, {g * Blocks(n), Blocks(k)}, 0},
            {"group_sizes", kS32, {g}, 0},
            {"first_row", kS32, {1}, 0}};
  c.rets = {{"out", c.Get("out_f32") ? kF32 : kBf16, {m, n}, 0}, {"next_tile", kS32, {1}, 0}};
}

void AddGroupedGated(Random& random, Case& c) {
  const auto [m, n, k] = ProductExtents(random, false);
  const int64_t g = Groups(random), f = Multiple(std::min<int64_t>(n, 65536), 128);
  c.args = {{"lhs", Fp8(c.Get("lhs_e5m2")), {m, k}, 0},
            {"lhs_scale", kF32, {m, Blocks(k)}, 0},
            {"rhs", Fp8(c.Get("rhs_e5m2")), {g * 2 * f, k}, 0},
            {"rhs_scale", kF32, {g * Blocks(2 * f), Blocks(k)}, 0},
            {"group_sizes", kS32, {g}, 0},
            {"first_row", kS32, {1}, 0}};
  c.rets = {{"h", Fp8(c.Get("h_e5m2")), {m, f}, 0},
            {"h_scale", kF32, {m, Blocks(f)}, 0},
            {"next_tile", kS32, {1}, 0}};
}

void AddGroupedContraction(Random& random, Case& c) {
  auto [m, n, k] = ProductExtents(random, false);
  if (c.Get("transpose_out")) std::swap(m, n);
  const int64_t scale_rows = c.Get("is_1d1d") ? n : Blocks(n);
  const int64_t g = Groups(random), t = Multiple(k, 128), tb = t / 128;
  c.args = {{"lhs", Fp8(c.Get("lhs_e5m2")), {m, t}, 0},
            {"lhs_scale", kF32, {m, tb}, 0},
            {"rhs", Fp8(c.Get("rhs_e5m2")), {n, t}, 0},
            {"rhs_scale", kF32, {scale_rows, tb}, 0},
            {"group_sizes", kS32, {g}, 0}};
  c.rets = {{"out", c.Get("out_f32") ? kF32 : kBf16, {g * m, n}, 0}};
  if (c.Get("transpose_out")) c.rets[0].dims = {g * n, m};
}

// From here on an extent is at its limit, and the others stay small.
constexpr int64_t kLarge = 1 << 20;

enum Mode { kRow, kColumn, kRowColumn, kBlock, kBlockTransposed, kBlockBoth, kRowBlockTransposed };
enum Source { kPlain, kSwiglu, kSwigluGrad, kGather, kWeightedGather, kWeightedSwigluGrad };

bool IsGather(int32_t source) { return source == kGather || source == kWeightedGather; }
bool IsSwigluGrad(int32_t source) { return source == kSwigluGrad || source == kWeightedSwigluGrad; }

// The operands of what is quantised, (m, k), but for the groups.
void AddQuantizeOperands(Random& random, Case& c, const std::vector<int64_t>& batch, int64_t m,
                         int64_t k) {
  const XLA_FFI_DataType kInputs[] = {kBf16, XLA_FFI_DataType_F16, kF32, Fp8(0), Fp8(1)};
  const XLA_FFI_DataType type = kInputs[c.Get("input")];
  const int32_t source = c.Get("source");
  const int64_t num_sources = k > kLarge ? 64 : Extent(random);
  std::vector<int64_t> dims = batch;
  dims.insert(dims.end(), {IsGather(source) ? num_sources : m, source == kSwiglu ? 2 * k : k});
  c.args.push_back({source == kSwiglu || IsSwigluGrad(source) ? "gate_up" : "x", type, dims, 0});
  if (IsSwigluGrad(source)) c.args.push_back({"dh", type, {m, k / 2}, 0});
  if (source == kWeightedSwigluGrad) c.args.push_back({"weights", kF32, {m}, 0});
  if (!IsGather(source)) return;
  if (c.Get("input") >= 3) c.args.push_back({"x_scale", kF32, {num_sources, Blocks(k)}, 0});
  c.args.push_back({"rows", kS32, {m}, 0});
  if (source == kWeightedGather) c.args.push_back({"weights", kF32, {m}, 0});
}

// The results of a mode; `columns`: tokens of the transposed values.
void AddQuantizeResults(Case& c, const std::vector<int64_t>& batch, int64_t m, int64_t k,
                        int64_t columns) {
  const auto add = [&](const char* name, XLA_FFI_DataType type, int64_t rows, int64_t width) {
    std::vector<int64_t> dims = batch;
    dims.insert(dims.end(), {rows, width});
    c.rets.push_back({name, type, dims, 0});
  };
  const XLA_FFI_DataType fp8 = Fp8(c.Get("e5m2"));
  const int64_t kb = Blocks(k), cb = Blocks(columns);
  const int32_t mode = c.Get("mode");
  const auto stored = [&](int64_t row) { return c.Get("padded") ? Multiple(row, 128) : row; };
  if (mode != kColumn && mode != kBlockTransposed) add("values", fp8, m, stored(k));
  const bool scales_rows = mode == kRow || mode == kRowColumn || mode == kRowBlockTransposed;
  if (scales_rows) add("scale", kF32, m, kb);
  if (mode != kRow && mode != kBlock) add("transposed", fp8, k, stored(columns));
  if (mode == kColumn || mode == kRowColumn) add("transposed_scale", kF32, k, cb);
  if (mode == kBlock || mode == kBlockBoth) add("scale", kF32, cb, kb);
  if (mode == kBlockTransposed || mode == kRowBlockTransposed) {
    add("transposed_scale", kF32, kb, cb);
  }
  if (c.Get("source") == kWeightedSwigluGrad) add("dots", kF32, Blocks(k / 2), m);
}

}  // namespace

Case LegalGemm(Random& random, const Config& config) {
  Case c = {};
  c.attributes.config = config;
  c.op = &ProductOf(c);
  if (c.op == &kQuantizingGemm) {
    AddQuantizing(random, c);
  } else if (c.op == &kGroupedGatedGemm) {
    AddGroupedGated(random, c);
  } else if (c.op == &kGroupedGemm) {
    AddGroupedRows(random, c);
  } else if (c.op == &kGroupedWgrad) {
    AddGroupedContraction(random, c);
  } else {
    AddDense(random, c);
  }
  if (c.Get("accumulate")) {
    c.args.push_back(c.rets[0]);
    c.args.back().name = "accum";
  }
  PlaceBuffers(c);
  return c;
}

Case LegalQuantize(Random& random, const Config& config) {
  Case c = {};
  c.attributes.config = config;
  c.op = &kQuantize;
  const bool is_ragged = c.Get("ragged"), is_plain = c.Get("source") == kPlain;
  int64_t m = Extent(random), k = Extent(random);
  if (random.Chance(0.03)) {
    // With room for the columns of 1024 groups, and in SwiGLU for gate and up.
    int64_t& large = random.Chance(0.5) ? m : k;
    large = ((int64_t{1} << 30) - kLarge) / (c.Get("source") == kSwiglu ? 2 : 1);
  }
  if (!is_ragged && random.Chance(0.03)) m = 0;
  if (IsSwigluGrad(c.Get("source"))) k = Multiple(k, c.Get("paired") ? 256 : 2);
  if (m > kLarge) k = std::min<int64_t>(k, 256);
  if (k > kLarge) m = std::min<int64_t>(m, 128);
  std::vector<int64_t> batch;
  const bool has_batch = !is_ragged && kBlock <= c.Get("mode") && c.Get("mode") <= kBlockBoth;
  if (is_plain && has_batch && std::max(m, k) <= kLarge && random.Chance(0.4)) {
    batch = {random.PickOf({1, 2, 5, 65535})};
  }
  AddQuantizeOperands(random, c, batch, m, k);
  int64_t columns = m;
  if (is_ragged) {
    const int64_t g = k > kLarge ? random.PickOf({1, 2, 64}) : Groups(random);
    c.args.push_back({"group_sizes", kS32, {g}, 0});
    c.args.push_back({"first_row", kS32, {1}, 0});
    columns = (m + 127 * g) / 128 * 128;
  }
  AddQuantizeResults(c, batch, m, k, columns);
  c.is_empty = m == 0;
  PlaceBuffers(c);
  return c;
}

Case LegalCopyRows(Random& random, const Config& config) {
  Case c = {};
  c.attributes.config = config;
  c.op = &kCopyRows;
  int64_t s = Extent(random), m = Extent(random), k = Multiple(Extent(random), c.Get("word_bytes"));
  int64_t copies = random.PickOf({1, 2, 3, 8, 31, 32, 33, 100});
  if (random.Chance(0.05)) {
    int64_t* large[] = {&s, &m, &k, &copies};
    const uint64_t which = random.Below(4);
    if (which < 2) k = 128;
    if (which >= 2) s = std::min<int64_t>(s, 128);
    *large[which] = int64_t{1} << 30;
  }
  if (random.Chance(0.05)) *random.Pick<int64_t*>({&s, &m, &k, &copies}) = 0;
  const XLA_FFI_DataType type = Fp8(random.PickOf({0, 1}));
  c.args = {{"x", type, {s, k}, 0},
            {"x_scale", kF32, {s, Blocks(k)}, 0},
            {"places", kS32, {s, copies}, 0}};
  c.rets = {{"values", type, {m, k}, 0}, {"scale", kF32, {m, Blocks(k)}, 0}};
  c.is_empty = s == 0 || m == 0 || k == 0 || copies == 0;
  PlaceBuffers(c);
  return c;
}

Case LegalSumRows(Random& random, const Config& config) {
  Case c = {};
  c.attributes.config = config;
  c.op = &kSumRows;
  const int element_bytes = c.Get("input") == 2 ? 4 : 2;
  int64_t s = Extent(random), m = Extent(random);
  int64_t k = Multiple(Extent(random), c.Get("word_bytes") / element_bytes);
  int64_t places = random.PickOf({1, 2, 3, 8, 31, 32, 33, 100});
  if (random.Chance(0.05)) {
    int64_t* large[] = {&s, &m, &k, &places};
    const uint64_t which = random.Below(4);
    if (which < 2) k = 128;
    if (which >= 2) s = std::min<int64_t>(s, 128);
    *large[which] = int64_t{1} << 30;
  }
  if (random.Chance(0.05)) *random.Pick<int64_t*>({&s, &m, &k, &places}) = 0;
  const XLA_FFI_DataType types[] = {kBf16, XLA_FFI_DataType_F16, kF32};
  const XLA_FFI_DataType type = types[c.Get("input")];
  c.args = {{"rows", type, {m, k}, 0},
            {"places", kS32, {s, places}, 0},
            {"weights", kF32, {s, places}, 0}};
  c.rets = {{"sums", type, {s, k}, 0}};
  c.is_empty = s == 0 || k == 0;
  PlaceBuffers(c);
  return c;
}

Case LegalCase(Random& random, const ConfigLists& lists) {
  if (random.Chance(0.1)) return LegalCopyRows(random, random.Pick(lists.copy_rows));
  if (random.Chance(0.1)) return LegalSumRows(random, random.Pick(lists.sum_rows));
  if (random.Chance(0.4)) return LegalQuantize(random, random.Pick(lists.quantize));
  return LegalGemm(random, random.Pick(lists.gemm));
}

}  // namespace harness
