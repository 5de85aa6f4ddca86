#include "frames.h"

#include <atomic>
#include <memory>

#include "fake_driver.h"

// The C API leaves these two to the runtime.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};
struct Context {
  void* stream;
};

namespace harness {
namespace {

std::atomic<long> num_errors{0};

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  ++num_errors;
  return new XLA_FFI_Error{args->errc, args->message};
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) {
  --num_errors;
  delete args->error;
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = reinterpret_cast<const Context*>(args->ctx)->stream;
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  api.api_version.major_version = XLA_FFI_API_MAJOR;
  api.api_version.minor_version = XLA_FFI_API_MINOR;
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_Destroy = DestroyError;
  api.XLA_FFI_Stream_Get = GetStream;
  return api;
}

const XLA_FFI_Api kApi = MakeApi();

// Pointers to the elements, as the C API wants its lists.
template <typename T>
std::vector<void*> Pointers(std::vector<T>& elements) {
  std::vector<void*> pointers;
  for (T& element : elements) pointers.push_back(&element);
  return pointers;
}

// A list of buffers in the form of the C API; `source` must outlive it.
struct BufferList {
  explicit BufferList(const std::vector<Buffer>& source) {
    for (const Buffer& buffer : source) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, buffer.type,
                         reinterpret_cast<void*>(buffer.address),
                         static_cast<int64_t>(buffer.dims.size()),
                         const_cast<int64_t*>(buffer.dims.data())});
    }
    pointers = Pointers(buffers);
  }
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
};

// A dictionary in the form of the C API. Names and values must outlive it.
class Dictionary {
 public:
  void Add(const std::string& name, XLA_FFI_AttrType type, void* value) {
    names_.push_back({name.data(), name.size()});
    types_.push_back(type);
    values_.push_back(value);
  }
  const XLA_FFI_Attrs& Get() {
    for (XLA_FFI_ByteSpan& name : names_) name_pointers_.push_back(&name);
    attrs_ = {XLA_FFI_Attrs_STRUCT_SIZE,
              nullptr,
              static_cast<int64_t>(names_.size()),
              types_.data(),
              name_pointers_.data(),
              values_.data()};
    return attrs_;
  }

 private:
  std::vector<XLA_FFI_ByteSpan> names_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> values_;
  XLA_FFI_Attrs attrs_;
};

// The attributes of a call in the form of the C API; `attributes` must outlive it.
class AttributeList {
 public:
  explicit AttributeList(const Attributes& attributes) {
    const AttributeFault fault = attributes.fault;
    members_.reserve(attributes.config.size());
    for (const auto& [name, value] : attributes.config) {
      const bool is_first = members_.empty();
      const bool is_wide = is_first && fault == AttributeFault::kInt64Member;
      const bool is_other = is_first && fault == AttributeFault::kNonScalarMember;
      wide_ = value;
      members_.push_back({is_wide ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32,
                          is_wide ? static_cast<void*>(&wide_) : const_cast<int32_t*>(&value)});
      config_.Add(name, is_other ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR,
                  &members_.back());
    }
    // XLA sorts attributes by name.
    if (attributes.rows_per_group.has_value()) {
      clears_ = {XLA_FFI_DataType_S32, const_cast<int32_t*>(&attributes.clears_unused)};
      all_.Add(clears_name_, XLA_FFI_AttrType_SCALAR, &clears_);
    }
    if (fault == AttributeFault::kNotDictionary) {
      all_.Add(config_name_, XLA_FFI_AttrType_SCALAR, &members_[0]);
    } else if (fault != AttributeFault::kAbsent) {
      all_.Add(config_name_, XLA_FFI_AttrType_DICTIONARY,
               const_cast<XLA_FFI_Attrs*>(&config_.Get()));
    }
    if (attributes.rows_per_group.has_value()) {
      const bool is_wide = fault == AttributeFault::kInt64Rows;
      wide_ = *attributes.rows_per_group;
      rows_ = {
          is_wide ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32,
          is_wide ? static_cast<void*>(&wide_) : const_cast<int32_t*>(&*attributes.rows_per_group)};
      all_.Add(rows_name_, XLA_FFI_AttrType_SCALAR, &rows_);
    }
  }
  const XLA_FFI_Attrs& Get() { return all_.Get(); }

 private:
  const std::string config_name_ = "config", rows_name_ = "rows_per_group",
                    clears_name_ = "clears_unused";
  std::vector<XLA_FFI_Scalar> members_;
  XLA_FFI_Scalar rows_, clears_;
  int64_t wide_ = 0;
  Dictionary config_, all_;
};

}  // namespace

uint64_t Buffer::Bytes() const {
  uint64_t bytes = ElementBytes(type);
  for (int64_t dim : dims) bytes *= dim;
  return bytes;
}

std::optional<Error> Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                          const std::vector<Buffer>& args, const std::vector<Buffer>& rets,
                          const Attributes& attributes, int device) {
  BufferList arg_list(args), ret_list(rets);
  AttributeList attribute_list(attributes);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  Context context = {fake::StreamOf(device)};
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &kApi;
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&context);
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()),
                arg_types.data(), arg_list.pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()),
                ret_types.data(), ret_list.pointers.data()};
  frame.attrs = attribute_list.Get();
  std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  if (error == nullptr) return std::nullopt;
  --num_errors;
  return Error{error->code, error->message};
}

HandlerFacts Describe(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &kApi;
  frame.extension_start = &extension.extension_base;
  handler(&frame);
  return {(metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) != 0,
          std::to_string(metadata.api_version.major_version) + "." +
              std::to_string(metadata.api_version.minor_version)};
}

long NumErrors() { return num_errors; }

int64_t ElementBytes(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_TOKEN:
      return 0;
    case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_F16:
      return 2;
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32:
      return 4;
    case XLA_FFI_DataType_F64:
      return 8;
    default:
      return 1;
  }
}

}  // namespace harness
