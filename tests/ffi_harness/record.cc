// Launches as JSON, with buffers by name instead of addresses.

#include <cstdio>
#include <cstring>
#include <map>

#include "calls.h"
#include "commands.h"
#include "copy_rows/copy_rows_params.h"
#include "gemm/gemm_launch.h"
#include "launch_checks.h"
#include "quantize/quantize_params.h"
#include "sum_rows/sum_rows_params.h"

namespace harness {
namespace {

using namespace jax_fp8gemm;

// One JSON object. Values are numbers, or text that is JSON already.
class Object {
 public:
  void Add(const std::string& name, const std::string& json) {
    text_ += (text_.empty() ? "\"" : ", \"") + name + "\": " + json;
  }
  void Add(const std::string& name, int64_t value) { Add(name, std::to_string(value)); }
  std::string Get() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

std::string Quoted(const std::string& text) { return "\"" + text + "\""; }

std::string List(std::initializer_list<int64_t> values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

// The buffer that starts here. out stands for accum too, with which it shares a buffer.
std::string BufferName(const Case& c, uint64_t address) {
  if (address == 0) return "null";
  for (const auto* buffers : {&c.rets, &c.args}) {
    for (const Buffer& buffer : *buffers) {
      if (buffer.address == address) return Quoted(buffer.name);
    }
  }
  return Quoted("none of the call");
}

std::string PointerName(const Case& c, const void* pointer) {
  return BufferName(c, reinterpret_cast<uintptr_t>(pointer));
}

std::string MapText(const Case& c, const CUtensorMap& bytes) {
  const fake::TensorMap* map = AsTensorMap(&bytes);
  if (map == nullptr) return "null";
  static const std::map<int, std::string> types = {{0, "uint8"}, {7, "float32"}, {9, "bfloat16"}};
  Object object;
  object.Add("buffer", BufferName(c, map->address));
  object.Add("type", Quoted(types.at(map->type)));
  object.Add("dims", List({int64_t(map->dims[0]), int64_t(map->dims[1])}));
  object.Add("row_stride", map->row_stride);
  object.Add("box", List({map->box[0], map->box[1]}));
  object.Add("element_strides", List({map->element_strides[0], map->element_strides[1]}));
  object.Add("swizzle_bytes", map->swizzle == 0 ? 0 : 16 << map->swizzle);
  object.Add("l2_promotion", map->l2_promotion);
  return object.Get();
}

std::string GemmText(const Case& c, const fake::Launch& launch) {
  GemmParams params;
  std::memcpy(&params, launch.params.data(), sizeof(params));
  Object object;
  object.Add("lhs", MapText(c, params.lhs));
  object.Add("rhs", MapText(c, params.rhs));
  object.Add("lhs_part", MapText(c, params.lhs_part));
  object.Add("lhs_scale_map", MapText(c, params.lhs_scale_map));
  object.Add("rhs_scale_map", MapText(c, params.rhs_scale_map));
  object.Add("out_map", MapText(c, params.out_map));
  object.Add("lhs_scale", PointerName(c, params.lhs_scale));
  object.Add("rhs_scale", PointerName(c, params.rhs_scale));
  object.Add("accum", PointerName(c, params.accum));
  object.Add("out", PointerName(c, params.out));
  object.Add("m", params.m);
  object.Add("n", params.n);
  object.Add("k", params.k);
  object.Add("lhs_rows", params.lhs_rows);
  object.Add("raster", params.raster);
  object.Add("num_groups", params.num_groups);
  object.Add("rows_per_group", params.rows_per_group);
  object.Add("group_sizes", PointerName(c, params.group_sizes));
  object.Add("first_row", PointerName(c, params.first_row));
  object.Add("next_tile", PointerName(c, params.next_tile));
  object.Add("first_part", params.first_part);
  object.Add("clears_rest", params.clears_rest);
  object.Add("out_scale", PointerName(c, params.out_scale));
  object.Add("lhs_values", PointerName(c, params.lhs_values));
  object.Add("lhs_columns", params.lhs_columns);
  return object.Get();
}

std::string QuantizeText(const Case& c, const fake::Launch& launch) {
  QuantizeParams params;
  std::memcpy(&params, launch.params.data(), sizeof(params));
  Object object;
  object.Add("x", PointerName(c, params.x));
  object.Add("dh", PointerName(c, params.dh));
  object.Add("values", PointerName(c, params.values));
  object.Add("scale", PointerName(c, params.scale));
  object.Add("transposed", PointerName(c, params.transposed));
  object.Add("transposed_scale", PointerName(c, params.transposed_scale));
  object.Add("m", params.m);
  object.Add("k", params.k);
  object.Add("num_m_blocks", params.num_m_blocks);
  object.Add("num_columns", params.num_columns);
  object.Add("num_groups", params.num_groups);
  object.Add("group_sizes", PointerName(c, params.group_sizes));
  object.Add("first_row", PointerName(c, params.first_row));
  object.Add("num_sources", params.num_sources);
  object.Add("x_scale", PointerName(c, params.x_scale));
  object.Add("rows", PointerName(c, params.rows));
  object.Add("weights", PointerName(c, params.weights));
  object.Add("dots", PointerName(c, params.dots));
  return object.Get();
}

std::string CopyRowsText(const Case& c, const fake::Launch& launch) {
  CopyRowsParams params;
  std::memcpy(&params, launch.params.data(), sizeof(params));
  Object object;
  object.Add("x", PointerName(c, params.x));
  object.Add("x_scale", PointerName(c, params.x_scale));
  object.Add("places", PointerName(c, params.places));
  object.Add("values", PointerName(c, params.values));
  object.Add("scale", PointerName(c, params.scale));
  object.Add("num_sources", params.num_sources);
  object.Add("num_copies", params.num_copies);
  object.Add("m", params.m);
  object.Add("k", params.k);
  return object.Get();
}

std::string SumRowsText(const Case& c, const fake::Launch& launch) {
  SumRowsParams params;
  std::memcpy(&params, launch.params.data(), sizeof(params));
  Object object;
  object.Add("rows", PointerName(c, params.rows));
  object.Add("places", PointerName(c, params.places));
  object.Add("weights", PointerName(c, params.weights));
  object.Add("sums", PointerName(c, params.sums));
  object.Add("num_sums", params.num_sums);
  object.Add("num_places", params.num_places);
  object.Add("m", params.m);
  object.Add("k", params.k);
  return object.Get();
}

std::string WorkText(const Case& c, const fake::Work& work) {
  const fake::Launch& launch = work.launches.at(0);
  Object object;
  object.Add("kernel", Quoted(launch.kernel));
  object.Add("grid", List({launch.grid[0], launch.grid[1]}));
  object.Add("block", launch.block[0]);
  object.Add("cluster", launch.cluster);
  object.Add("smem_bytes", launch.dynamic_smem_bytes);
  std::string zeroed;
  for (const fake::Memset& memset : work.memsets) {
    zeroed += (zeroed.empty() ? "" : ", ") + BufferName(c, memset.address);
  }
  object.Add("zeroed", "[" + zeroed + "]");
  const auto text = c.op == &kQuantize   ? QuantizeText
                    : c.op == &kCopyRows ? CopyRowsText
                    : c.op == &kSumRows  ? SumRowsText
                                         : GemmText;
  object.Add("params", text(c, launch));
  return object.Get();
}

}  // namespace

void RecordLaunches(const std::vector<Case>& cases) {
  Reconfigure();
  std::printf("{");
  const char* separator = "\n";
  for (const Case& c : cases) {
    const Outcome outcome = RunStages(c);
    RequireSuccess(c, outcome);
    std::printf("%s\"%s\": %s", separator, c.name.c_str(), WorkText(c, outcome.work).c_str());
    separator = ",\n";
  }
  std::printf("\n}\n");
}

}  // namespace harness
