#include "cases.h"

#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "copy_rows/copy_rows.h"
#include "gemm/gemm.h"
#include "gemm/grouped_gated_gemm.h"
#include "gemm/grouped_gemm.h"
#include "gemm/grouped_wgrad.h"
#include "gemm/quantizing_gemm.h"
#include "quantize/quantize.h"
#include "sum_rows/sum_rows.h"

namespace harness {

using namespace jax_fp8gemm;

const Op kGemm = {"gemm", GemmInstantiateHandler, GemmPrepareHandler, GemmExecuteHandler};
const Op kQuantizingGemm = {"quantizing_gemm", QuantizingGemmInstantiateHandler,
                            QuantizingGemmPrepareHandler, QuantizingGemmExecuteHandler};
const Op kGroupedGemm = {"grouped_gemm", GroupedGemmInstantiateHandler, GroupedGemmPrepareHandler,
                         GroupedGemmExecuteHandler};
const Op kGroupedGatedGemm = {"grouped_gated_gemm", GroupedGatedGemmInstantiateHandler,
                              GroupedGatedGemmPrepareHandler, GroupedGatedGemmExecuteHandler};
const Op kGroupedWgrad = {"grouped_wgrad", GroupedWgradInstantiateHandler,
                          GroupedWgradPrepareHandler, GroupedWgradExecuteHandler};
const Op kQuantize = {"quantize", QuantizeInstantiateHandler, QuantizePrepareHandler,
                      QuantizeExecuteHandler};
const Op kCopyRows = {"copy_rows", CopyRowsInstantiateHandler, CopyRowsPrepareHandler,
                      CopyRowsExecuteHandler};
const Op kSumRows = {"sum_rows", SumRowsInstantiateHandler, SumRowsPrepareHandler,
                     SumRowsExecuteHandler};
const Op* const kOps[8] = {&kGemm,         &kQuantizingGemm, &kGroupedGemm, &kGroupedGatedGemm,
                           &kGroupedWgrad, &kQuantize,       &kCopyRows,    &kSumRows};

namespace {

Buffer ReadBuffer(std::istream& line) {
  static const std::map<std::string, XLA_FFI_DataType> types = {
      {"f8e4m3fn", XLA_FFI_DataType_F8E4M3FN}, {"f8e5m2", XLA_FFI_DataType_F8E5M2},
      {"bf16", XLA_FFI_DataType_BF16},         {"f16", XLA_FFI_DataType_F16},
      {"f32", XLA_FFI_DataType_F32},           {"i32", XLA_FFI_DataType_S32}};
  Buffer buffer = {};
  std::string type;
  line >> buffer.name >> type;
  buffer.type = types.at(type);
  for (int64_t dim; line >> dim;) buffer.dims.push_back(dim);
  return buffer;
}

}  // namespace

const Buffer* Case::Find(const std::string& buffer) const {
  for (const auto* buffers : {&args, &rets}) {
    for (const Buffer& candidate : *buffers) {
      if (candidate.name == buffer) return &candidate;
    }
  }
  return nullptr;
}

int32_t Case::Get(const std::string& member) const {
  for (const auto& [name, value] : attributes.config) {
    if (name == member) return value;
  }
  return 0;
}

const Op& ProductOf(const Case& c) {
  if (c.Get("quantizes_lhs")) return kQuantizingGemm;
  if (c.Get("gated")) return kGroupedGatedGemm;
  const int32_t grouping = c.Get("grouping");
  return grouping == 1 ? kGroupedGemm : grouping == 2 ? kGroupedWgrad : kGemm;
}

Config ReadConfig(std::istream& line) {
  Config config;
  std::string word;
  while (line >> word && word != "|") {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) throw std::runtime_error("not name=value: " + word);
    config.emplace_back(word.substr(0, equals), std::stoi(word.substr(equals + 1)));
  }
  return config;
}

ConfigLists ReadConfigLists(const std::string& path) {
  ConfigLists lists;
  std::ifstream file(path);
  for (std::string text; std::getline(file, text);) {
    std::istringstream line(text);
    std::string kind;
    line >> kind;
    auto& list = kind == "gemm"        ? lists.gemm
                 : kind == "quantize"  ? lists.quantize
                 : kind == "copy_rows" ? lists.copy_rows
                                       : lists.sum_rows;
    list.push_back(ReadConfig(line));
  }
  for (const auto* list : {&lists.gemm, &lists.quantize, &lists.copy_rows, &lists.sum_rows}) {
    if (!list->empty()) continue;
    throw std::runtime_error("must have gemm, quantize, copy_rows and sum_rows configs: " + path);
  }
  return lists;
}

std::vector<Case> ReadCases(const std::string& path) {
  std::vector<Case> cases;
  std::ifstream file(path);
  for (std::string text; std::getline(file, text);) {
    std::istringstream line(text);
    std::string word;
    line >> word;
    if (word == "case") {
      cases.emplace_back();
      std::getline(line >> std::ws, cases.back().name);
      continue;
    }
    Case& c = cases.at(cases.size() - 1);
    if (word == "op") {
      line >> word;
      for (const Op* op : kOps) {
        if (word == op->name) c.op = op;
      }
    } else if (word == "rows_per_group") {
      line >> c.attributes.rows_per_group.emplace();
    } else if (word == "clears_unused") {
      line >> c.attributes.clears_unused;
    } else if (word == "config") {
      c.attributes.config = ReadConfig(line);
    } else if (word == "arg" || word == "ret") {
      (word == "arg" ? c.args : c.rets).push_back(ReadBuffer(line));
    } else {
      throw std::runtime_error("not a line of a case: " + text);
    }
  }
  for (Case& c : cases) PlaceBuffers(c);
  return cases;
}

void PlaceBuffers(Case& c) {
  uint64_t next = 0x7f0000000000;
  for (auto* buffers : {&c.args, &c.rets}) {
    for (Buffer& buffer : *buffers) {
      // XLA aligns buffers so, and has none for what is empty.
      buffer.address = buffer.Bytes() > 0 ? next : 0;
      next += (buffer.Bytes() + 255) / 256 * 256 + 256;
    }
  }
  // An accumulator and the result share a buffer.
  for (Buffer& buffer : c.args) {
    if (buffer.name == "accum") buffer.address = c.rets[0].address;
  }
}

std::string Describe(const Case& c) {
  if (c.op == nullptr) return "no call";
  std::ostringstream text;
  text << c.op->name;
  for (const auto& [name, value] : c.attributes.config) text << " " << name << "=" << value;
  if (c.attributes.rows_per_group) {
    text << " rows_per_group=" << *c.attributes.rows_per_group
         << " clears_unused=" << c.attributes.clears_unused;
  }
  if (c.attributes.fault != AttributeFault::kNone) {
    text << " attribute_fault=" << static_cast<int>(c.attributes.fault);
  }
  const char* kind = " | args:";
  for (const auto* buffers : {&c.args, &c.rets}) {
    text << kind;
    kind = " | rets:";
    for (const Buffer& buffer : *buffers) {
      text << " " << buffer.name << " type" << buffer.type << "[";
      const char* separator = "";
      for (int64_t dim : buffer.dims) text << std::exchange(separator, ",") << dim;
      text << "]@" << std::hex << buffer.address << std::dec;
    }
  }
  return text.str();
}

}  // namespace harness
