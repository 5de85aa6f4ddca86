#include "launch_checks.h"

#include <algorithm>
#include <cstring>

#include "copy_rows/copy_rows_params.h"
#include "gemm/gemm_launch.h"
#include "quantize/quantize_config.h"
#include "quantize/quantize_params.h"
#include "sum_rows/sum_rows_params.h"

namespace harness {
namespace {

using namespace jax_fp8gemm;

uint64_t AddressOf(const Case& c, const std::string& name) {
  const Buffer* buffer = c.Find(name);
  return buffer == nullptr ? 0 : buffer->address;
}

// Collects the first fault.
class Checker {
 public:
  explicit Checker(const Case& c) : case_(c) {}

  void Require(bool holds, const std::string& what) {
    if (!holds && fault_.empty()) fault_ = what;
  }
  // The parameter is the address of the buffer of this name, or null if the call has none.
  void RequirePointer(const void* parameter, const std::string& name) {
    const Buffer* buffer = case_.Find(name);
    Require(reinterpret_cast<uintptr_t>(parameter) == AddressOf(case_, name),
            name + " must be the buffer of the call");
    Require(buffer == nullptr || buffer->address != 0 || buffer->Bytes() == 0,
            name + " must not be null");
  }
  // The map covers rows of the buffer and nothing else; it is not encoded unless it is used.
  void RequireMap(const CUtensorMap& bytes, const std::string& name, const std::string& buffer_name,
                  bool is_used) {
    const fake::TensorMap* map = AsTensorMap(&bytes);
    Require((map != nullptr) == is_used, name + (is_used ? " is missing" : " is not used"));
    const Buffer* buffer = case_.Find(buffer_name);
    if (map == nullptr || buffer == nullptr) return;
    const uint64_t row_bytes = map->dims[0] * ElementBytes(buffer->type);
    Require(map->address == buffer->address, name + " must start where its buffer does");
    Require((map->dims[1] - 1) * map->row_stride + row_bytes == buffer->Bytes(),
            name + " must cover its buffer");
  }
  const std::string& fault() const { return fault_; }

 private:
  const Case& case_;
  std::string fault_;
};

template <typename Params>
bool Decode(const fake::Launch& launch, Params* params) {
  if (launch.params.size() != sizeof(Params)) return false;
  std::memcpy(params, launch.params.data(), sizeof(Params));
  return true;
}

void CheckGemm(const Case& c, const fake::Launch& launch, Checker& check) {
  GemmParams params;
  check.Require(Decode(launch, &params), "a GEMM has GemmParams");
  if (!check.fault().empty()) return;
  const int32_t grouping = c.Get("grouping");
  check.RequirePointer(params.lhs_scale, "lhs_scale");
  check.RequirePointer(params.rhs_scale, "rhs_scale");
  check.RequirePointer(params.out, c.Get("gated") ? "h" : "out");
  check.RequirePointer(params.out_scale, "h_scale");
  check.RequirePointer(params.accum, "accum");
  check.RequirePointer(params.group_sizes, "group_sizes");
  check.RequirePointer(params.first_row, "first_row");
  check.RequirePointer(params.next_tile, "next_tile");
  const int64_t m = c.Find("lhs")->dims[0];
  const bool quantizes = c.Get("quantizes_lhs"), divides_k = c.Get("cluster_k") > 1;
  check.RequireMap(params.lhs, "lhs", "lhs", !quantizes);
  check.RequireMap(params.rhs, "rhs", "rhs", true);
  // Boxes of a group's rows, or of the rows with which lhs ends inside a CTA's part of a tile.
  const bool is_plain = grouping == 0 && !c.Get("is_1d1d") && !c.Get("accumulate") && !quantizes;
  const bool ends_inside = m % (c.Get("block_m") / c.Get("cluster_n")) != 0;
  check.RequireMap(params.lhs_part, "lhs_part", "lhs", grouping == 1 || (is_plain && ends_inside));
  check.RequireMap(params.lhs_scale_map, "lhs_scale_map", "lhs_scale",
                   m % (m <= 128 ? 8 : 4) == 0 && !divides_k && !quantizes);
  check.RequireMap(params.rhs_scale_map, "rhs_scale_map", "rhs_scale", c.Get("is_1d1d"));
  // Tiles of columns that 32 does not divide have slabs for bf16 alone.
  const bool has_slabs =
      c.Get("num_slabs") > 0 && (c.Get("block_n") % 32 == 0 || !c.Get("out_f32"));
  check.RequireMap(params.out_map, "out_map", "out", has_slabs && !c.Get("gated"));
  check.Require(params.lhs_rows == (quantizes ? 0 : m), "lhs_rows must be the rows of lhs");
  if (quantizes) {
    check.RequirePointer(params.lhs_values, "lhs");
    check.Require(params.lhs_columns == c.Find("lhs")->dims[1] && m <= 8,
                  "rows of lhs must be whole, and at most 8");
  } else {
    check.Require(params.lhs_values == nullptr, "lhs is not quantised");
  }
  const unsigned cluster = c.Get("cluster_m") * c.Get("cluster_n") * c.Get("cluster_k");
  check.Require(launch.cluster == cluster, "the cluster must be the config's");
  check.Require(launch.grid[0] <= static_cast<unsigned>(c.Get("num_sms")) && launch.grid[1] == 1,
                "no more CTAs than num_sms");
  const int num_others = quantizes && !divides_k ? 3 : 1;
  check.Require(launch.block[0] == 128u * (c.Get("num_consumers") + num_others),
                "a warpgroup for each consumer, one for the producer, and two that quantise lhs");
  check.Require(params.raster >= 1, "raster must be positive");
  check.Require(params.first_part >= 0, "first_part must not overflow");
  const bool clears_rest = c.op == &kGroupedGemm && c.attributes.clears_unused == 1;
  check.Require(params.clears_rest == clears_rest, "clears_rest must follow the attributes");
}

// A random mode of one layout may stand in for that of another whose results have the same shapes,
// as those of a square x have. Then the mode says which layout is stored, and not their names.
void CheckLayouts(const Case& c, const QuantizeParams& params, Checker& check) {
  const int mode = c.Get("mode");
  if (c.rets.size() > 2) {
    check.RequirePointer(params.values, "values");
    check.RequirePointer(params.scale, "scale");
    check.RequirePointer(params.transposed, "transposed");
    check.RequirePointer(params.transposed_scale, "transposed_scale");
  } else if (mode == kColumn || mode == kBlockTransposed) {
    check.RequirePointer(params.transposed, c.rets[0].name);
    check.RequirePointer(params.transposed_scale, c.rets[1].name);
    check.Require(params.values == nullptr && params.scale == nullptr, "rows are not stored");
  } else {
    check.RequirePointer(params.values, c.rets[0].name);
    check.RequirePointer(params.scale, c.rets[1].name);
    check.Require(params.transposed == nullptr && params.transposed_scale == nullptr,
                  "columns are not stored");
  }
}

void CheckQuantize(const Case& c, const fake::Launch& launch, Checker& check) {
  QuantizeParams params;
  check.Require(Decode(launch, &params), "a quantiser has QuantizeParams");
  if (!check.fault().empty()) return;
  check.RequirePointer(params.x, c.Find("gate_up") ? "gate_up" : "x");
  check.RequirePointer(params.dh, "dh");
  CheckLayouts(c, params, check);
  check.RequirePointer(params.group_sizes, "group_sizes");
  check.RequirePointer(params.first_row, "first_row");
  check.RequirePointer(params.x_scale, "x_scale");
  check.RequirePointer(params.rows, "rows");
  check.RequirePointer(params.weights, "weights");
  check.RequirePointer(params.dots, "dots");
  const int64_t kb = (int64_t{params.k} + 127) / 128;
  const int64_t num_units = c.Get("mode") == 0 ? ((int64_t{params.m} + 15) / 16 * kb + 3) / 4
                                               : int64_t{params.num_m_blocks} * kb;
  check.Require(num_units <= INT32_MAX, "the kernel counts its units in 32 bits");
  const bool walks = launch.dynamic_smem_bytes > 0;  // CTAs take several units
  check.Require(walks ? launch.grid[0] <= num_units : launch.grid[0] == num_units,
                "a CTA for each unit, or fewer that walk them");
  check.Require(launch.cluster == 1, "quantisers have no clusters");
}

void CheckCopyRows(const Case& c, const fake::Launch& launch, Checker& check) {
  CopyRowsParams params;
  check.Require(Decode(launch, &params), "a copier of rows has CopyRowsParams");
  if (!check.fault().empty()) return;
  check.RequirePointer(params.x, "x");
  check.RequirePointer(params.x_scale, "x_scale");
  check.RequirePointer(params.places, "places");
  check.RequirePointer(params.values, "values");
  check.RequirePointer(params.scale, "scale");
  const auto dims_of = [&](const char* name) { return c.Find(name)->dims; };
  check.Require(dims_of("x") == std::vector<int64_t>{params.num_sources, params.k} &&
                    dims_of("places")[1] == params.num_copies && dims_of("values")[0] == params.m,
                "the extents must be those of the buffers");
  check.Require(params.k % c.Get("word_bytes") == 0, "rows must be whole words");
  const int64_t pieces = int64_t{params.num_sources} * ((int64_t{params.k} + 2047) / 2048);
  check.Require(pieces <= INT32_MAX && launch.grid[0] == (pieces + 7) / 8,
                "a warp for each piece, which the kernel counts in 32 bits");
  check.Require(launch.cluster == 1 && launch.grid[1] == 1, "one dimension, and no clusters");
}

void CheckSumRows(const Case& c, const fake::Launch& launch, Checker& check) {
  SumRowsParams params;
  check.Require(Decode(launch, &params), "an adder of rows has SumRowsParams");
  if (!check.fault().empty()) return;
  check.RequirePointer(params.rows, "rows");
  check.RequirePointer(params.places, "places");
  check.RequirePointer(params.weights, "weights");
  check.RequirePointer(params.sums, "sums");
  const auto dims_of = [&](const char* name) { return c.Find(name)->dims; };
  check.Require(dims_of("sums") == std::vector<int64_t>{params.num_sums, params.k} &&
                    dims_of("places")[1] == params.num_places && dims_of("rows")[0] == params.m,
                "the extents must be those of the buffers");
  const int64_t row_bytes = int64_t{params.k} * (c.Get("input") == 2 ? 4 : 2);
  check.Require(row_bytes % c.Get("word_bytes") == 0, "rows must be whole words");
  const int64_t pieces = int64_t{params.num_sums} * ((row_bytes + 2047) / 2048);
  check.Require(pieces <= INT32_MAX && launch.grid[0] == (pieces + 3) / 4,
                "a warp for each piece, which the kernel counts in 32 bits");
  check.Require(launch.cluster == 1 && launch.grid[1] == 1, "one dimension, and no clusters");
}

// Fills lie in results, and are zeros.
void CheckMemset(const Case& c, const fake::Memset& memset, Checker& check) {
  const uint64_t end = memset.address + 4 * memset.words;
  const bool is_result = std::any_of(c.rets.begin(), c.rets.end(), [&](const Buffer& buffer) {
    return memset.address == buffer.address && end == buffer.address + buffer.Bytes();
  });
  check.Require(is_result && memset.value == 0, "a fill must zero a result");
}

}  // namespace

const fake::TensorMap* AsTensorMap(const void* bytes) {
  const auto* map = static_cast<const fake::TensorMap*>(bytes);
  return map->kind == fake::TensorMap::kKind ? map : nullptr;
}

std::string WorkFault(const Case& c, const fake::Work& work) {
  Checker check(c);
  const size_t num_launches = c.is_empty ? 0 : 1;
  if (work.launches.size() != num_launches) {
    return "launches must number " + std::to_string(num_launches) + "; got " +
           std::to_string(work.launches.size());
  }
  for (const fake::Launch& launch : work.launches) {
    const auto check_launch = c.op == &kQuantize   ? CheckQuantize
                              : c.op == &kCopyRows ? CheckCopyRows
                              : c.op == &kSumRows  ? CheckSumRows
                                                   : CheckGemm;
    check_launch(c, launch, check);
  }
  const bool clears_out = c.op == &kGroupedGemm && c.attributes.clears_unused == 2;
  const bool counts_tiles = c.op == &kGroupedGemm || c.op == &kGroupedGatedGemm;
  const size_t num_memsets = counts_tiles ? 1 + clears_out : 0;
  check.Require(work.memsets.size() == num_memsets, "fills: of next_tile and of a masked out");
  for (const fake::Memset& memset : work.memsets) CheckMemset(c, memset, check);
  return check.fault();
}

}  // namespace harness
