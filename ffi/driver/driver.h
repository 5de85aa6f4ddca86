// The part of the CUDA driver API that this library calls, opened at run time.
//
// Types and values are those of cuda.h (identical in CUDA 12 and 13), declared here so that neither
// building nor importing needs CUDA. libcuda.so.1 is opened by the first GetDriver().

#ifndef JAX_FP8GEMM_DRIVER_DRIVER_H_
#define JAX_FP8GEMM_DRIVER_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "errors.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUstream_st* CUstream;
typedef struct CUlib_st* CUlibrary;
typedef struct CUkern_st* CUkernel;
typedef struct CUfunc_st* CUfunction;

constexpr CUresult CUDA_SUCCESS = 0;

constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;

// A TMA descriptor. Pass it to a kernel by value, as `const __grid_constant__`.
struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

enum CUtensorMapDataType : int {
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
};

enum CUtensorMapSwizzle : int {
  CU_TENSOR_MAP_SWIZZLE_NONE = 0,
  CU_TENSOR_MAP_SWIZZLE_64B = 2,
  CU_TENSOR_MAP_SWIZZLE_128B = 3,
};

enum CUtensorMapL2promotion : int {
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3,
};
enum CUtensorMapInterleave : int { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapFloatOOBfill : int { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

enum CUlaunchAttributeID : int { CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4 };

union CUlaunchAttributeValue {
  char pad[64];
  uint64_t align_as_pointers;
  struct {
    unsigned int x, y, z;
  } clusterDim;
};

struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char pad[8 - sizeof(CUlaunchAttributeID)];
  CUlaunchAttributeValue value;
};

struct CUlaunchConfig {
  unsigned int gridDimX, gridDimY, gridDimZ;
  unsigned int blockDimX, blockDimY, blockDimZ;
  unsigned int sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned int numAttrs;
};

static_assert(sizeof(CUtensorMap) == 128 && alignof(CUtensorMap) == 64);
static_assert(sizeof(CUlaunchAttribute) == 72 && offsetof(CUlaunchAttribute, value) == 8);
static_assert(sizeof(CUlaunchConfig) == 56 && offsetof(CUlaunchConfig, hStream) == 32);

// Entry points of libcuda, named after the functions of cuda.h.
struct Driver {
  CUresult (*cuInit)(unsigned int flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult error, const char** name);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetName)(char* name, int length, CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuCtxGetDevice)(CUdevice* device);
  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, void* jit_options,
                                void** jit_option_values, unsigned int num_jit_options,
                                void* library_options, void** library_option_values,
                                unsigned int num_library_options);
  CUresult (*cuLibraryGetKernel)(CUkernel* kernel, CUlibrary library, const char* name);
  CUresult (*cuKernelGetFunction)(CUfunction* function, CUkernel kernel);
  CUresult (*cuKernelSetAttribute)(int attribute, int value, CUkernel kernel, CUdevice device);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function,
                               void** kernel_params, void** extra);
  CUresult (*cuOccupancyMaxActiveClusters)(int* num_clusters, CUfunction function,
                                           const CUlaunchConfig* config);
  CUresult (*cuMemsetD32Async)(CUdeviceptr destination, unsigned int value, size_t count,
                               CUstream stream);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap* tensor_map, CUtensorMapDataType type,
                                     uint32_t rank, void* global_address,
                                     const uint64_t* global_dim, const uint64_t* global_strides,
                                     const uint32_t* box_dim, const uint32_t* element_strides,
                                     CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion l2_promotion,
                                     CUtensorMapFloatOOBfill oob_fill);
  int version;  // 1000 * major + 10 * minor of the newest CUDA that the driver supports
};

// The driver, opened and initialised by the first call; the same answer, an error included, ever
// after. Thread-safe, and cheap enough for Execute.
ffi::ErrorOr<const Driver*> GetDriver();

// The device of the current context, which XLA sets in every stage that has operands.
ffi::ErrorOr<CUdevice> CurrentDevice(const Driver& driver);

// Multiprocessors of a device.
ffi::ErrorOr<int> NumSms(const Driver& driver, CUdevice device);

// An Internal error: expression, file:line, and the driver's name and words for `result`.
ffi::Error DriverError(const char* expr, const char* file, int line, CUresult result);

// How to launch: `cluster_x` CTAs form a cluster along x.
struct LaunchDims {
  unsigned int grid_x, grid_y;
  unsigned int block_x;
  unsigned int dynamic_smem_bytes;
  unsigned int cluster_x = 1;
};

// How many clusters of these dimensions the current device runs at a time, if it runs nothing else.
ffi::ErrorOr<int> CountActiveClusters(const Driver& driver, CUkernel kernel,
                                      const LaunchDims& dims);

// Launches on `stream`. `params` holds one pointer per kernel parameter.
ffi::Error LaunchKernel(const Driver& driver, CUkernel kernel, const LaunchDims& dims,
                        CUstream stream, void** params);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_DRIVER_DRIVER_H_
