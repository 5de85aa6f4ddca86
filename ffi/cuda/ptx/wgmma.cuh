// wgmma: out += lhs * rhs, one warpgroup, both operands in shared memory (PTX ISA, "Asynchronous
// Warpgroup Level Matrix Instructions"). FP8 operands must both be K-major: 8-bit types have no
// transposed form.
//
// The operand formats are set by the translation unit: JAX_FP8GEMM_LHS_TYPE and
// JAX_FP8GEMM_RHS_TYPE, "e4m3" or "e5m2".
#pragma once

#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

// Orders earlier register accesses, also to accumulators, before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kNumPending committed groups are in flight.
template <int kNumPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNumPending) : "memory");
}

// Keeps the compiler from moving reads of accumulators across this point; emits nothing.
template <int kNumRegs>
__device__ __forceinline__ void wgmma_pin(float (&accum)[kNumRegs]) {
#pragma unroll
  for (int i = 0; i < kNumRegs; ++i) asm volatile("" : "+f"(accum[i])::"memory");
}

// Lower word of the matrix descriptor of a K-major tile of 128-byte rows with the 128-byte swizzle,
// 1024-byte aligned: start address / 16. Adding 2 moves 32 bytes along k, adding 512 moves 64 rows.
// The upper word is constant: 1024 / 16, the distance of 8-row groups, and swizzle mode 1 in the
// top bits. NOTE: kept as one 32-bit word; 64-bit arithmetic on descriptors cost more issue slots
// than the wgmma themselves.
__device__ __forceinline__ uint32_t wgmma_descriptor(const void* tile) {
  return smem_address(tile) >> 4;
}

#define JAX_FP8GEMM_DESCRIPTOR_UPPER "0x40000040"

// accum[4j + 2h + c] of lane l in warp w is row 16w + l/4 + 8h, column 8j + 2(l%4) + c. With
// kIsFirst the accumulators start from zero instead of their old value. kExchanged: the first
// operand has the format of rhs, the second that of lhs. kN: a multiple of 8.
template <int kN>
struct Wgmma;

// The operand lists "%0, %1, ..." and "+f"(d[0]), ..., each from a shorter one.
#define JAX_FP8GEMM_REGS_4 "%0, %1, %2, %3"
#define JAX_FP8GEMM_REGS_8 JAX_FP8GEMM_REGS_4 ", %4, %5, %6, %7"
#define JAX_FP8GEMM_REGS_12 JAX_FP8GEMM_REGS_8 ", %8, %9, %10, %11"
#define JAX_FP8GEMM_REGS_16 JAX_FP8GEMM_REGS_12 ", %12, %13, %14, %15"
#define JAX_FP8GEMM_REGS_20 JAX_FP8GEMM_REGS_16 ", %16, %17, %18, %19"
#define JAX_FP8GEMM_REGS_24 JAX_FP8GEMM_REGS_20 ", %20, %21, %22, %23"
#define JAX_FP8GEMM_REGS_28 JAX_FP8GEMM_REGS_24 ", %24, %25, %26, %27"
#define JAX_FP8GEMM_REGS_32 JAX_FP8GEMM_REGS_28 ", %28, %29, %30, %31"
#define JAX_FP8GEMM_REGS_36 JAX_FP8GEMM_REGS_32 ", %32, %33, %34, %35"
#define JAX_FP8GEMM_REGS_40 JAX_FP8GEMM_REGS_36 ", %36, %37, %38, %39"
#define JAX_FP8GEMM_REGS_44 JAX_FP8GEMM_REGS_40 ", %40, %41, %42, %43"
#define JAX_FP8GEMM_REGS_48 JAX_FP8GEMM_REGS_44 ", %44, %45, %46, %47"
#define JAX_FP8GEMM_REGS_52 JAX_FP8GEMM_REGS_48 ", %48, %49, %50, %51"
#define JAX_FP8GEMM_REGS_56 JAX_FP8GEMM_REGS_52 ", %52, %53, %54, %55"
#define JAX_FP8GEMM_REGS_60 JAX_FP8GEMM_REGS_56 ", %56, %57, %58, %59"
#define JAX_FP8GEMM_REGS_64 JAX_FP8GEMM_REGS_60 ", %60, %61, %62, %63"
#define JAX_FP8GEMM_REGS_72 JAX_FP8GEMM_REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define JAX_FP8GEMM_REGS_80 JAX_FP8GEMM_REGS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define JAX_FP8GEMM_REGS_96 \
  JAX_FP8GEMM_REGS_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_FP8GEMM_OUTS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define JAX_FP8GEMM_OUTS_8 JAX_FP8GEMM_OUTS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define JAX_FP8GEMM_OUTS_12 JAX_FP8GEMM_OUTS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define JAX_FP8GEMM_OUTS_16 JAX_FP8GEMM_OUTS_12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define JAX_FP8GEMM_OUTS_20 JAX_FP8GEMM_OUTS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define JAX_FP8GEMM_OUTS_24 JAX_FP8GEMM_OUTS_20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define JAX_FP8GEMM_OUTS_28 JAX_FP8GEMM_OUTS_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define JAX_FP8GEMM_OUTS_32 JAX_FP8GEMM_OUTS_28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define JAX_FP8GEMM_OUTS_36 JAX_FP8GEMM_OUTS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define JAX_FP8GEMM_OUTS_40 JAX_FP8GEMM_OUTS_36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define JAX_FP8GEMM_OUTS_44 JAX_FP8GEMM_OUTS_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define JAX_FP8GEMM_OUTS_48 JAX_FP8GEMM_OUTS_44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define JAX_FP8GEMM_OUTS_52 JAX_FP8GEMM_OUTS_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define JAX_FP8GEMM_OUTS_56 JAX_FP8GEMM_OUTS_52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define JAX_FP8GEMM_OUTS_60 JAX_FP8GEMM_OUTS_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define JAX_FP8GEMM_OUTS_64 JAX_FP8GEMM_OUTS_60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define JAX_FP8GEMM_OUTS_72                                                             \
  JAX_FP8GEMM_OUTS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), \
      "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define JAX_FP8GEMM_OUTS_80                                                             \
  JAX_FP8GEMM_OUTS_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
      "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define JAX_FP8GEMM_OUTS_96                                                                      \
  JAX_FP8GEMM_OUTS_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),          \
      "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), \
      "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])

#define JAX_FP8GEMM_WGMMA_TYPES(kN, kRegs, lhs, rhs, scale, types)        \
  asm volatile("{\n.reg .pred p;\n.reg .b64 l, r;\nsetp.ne.b32 p, " scale \
               ", 0;\n"                                                   \
               "mov.b64 l, {" lhs ", " JAX_FP8GEMM_DESCRIPTOR_UPPER       \
               "};\n"                                                     \
               "mov.b64 r, {" rhs ", " JAX_FP8GEMM_DESCRIPTOR_UPPER       \
               "};\n"                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #kN "k32.f32." types   \
               " {" JAX_FP8GEMM_REGS_##kRegs "}, l, r, p, 1, 1;\n}\n"     \
               : JAX_FP8GEMM_OUTS_##kRegs                                 \
               : "r"(lhs_descriptor), "r"(rhs_descriptor), "n"(kIsFirst ? 0 : 1))

#define JAX_FP8GEMM_WGMMA(kN, kRegs, lhs, rhs, scale)                                      \
  template <>                                                                              \
  struct Wgmma<kN> {                                                                       \
    template <bool kIsFirst, bool kExchanged = false>                                      \
    __device__ static __forceinline__ void run(float (&d)[kRegs], uint32_t lhs_descriptor, \
                                               uint32_t rhs_descriptor) {                  \
      if constexpr (kExchanged) {                                                          \
        JAX_FP8GEMM_WGMMA_TYPES(kN, kRegs, lhs, rhs, scale,                                \
                                JAX_FP8GEMM_RHS_TYPE "." JAX_FP8GEMM_LHS_TYPE);            \
      } else {                                                                             \
        JAX_FP8GEMM_WGMMA_TYPES(kN, kRegs, lhs, rhs, scale,                                \
                                JAX_FP8GEMM_LHS_TYPE "." JAX_FP8GEMM_RHS_TYPE);            \
      }                                                                                    \
    }                                                                                      \
  };

JAX_FP8GEMM_WGMMA(8, 4, "%4", "%5", "%6")
JAX_FP8GEMM_WGMMA(16, 8, "%8", "%9", "%10")
JAX_FP8GEMM_WGMMA(24, 12, "%12", "%13", "%14")
JAX_FP8GEMM_WGMMA(32, 16, "%16", "%17", "%18")
JAX_FP8GEMM_WGMMA(40, 20, "%20", "%21", "%22")
JAX_FP8GEMM_WGMMA(48, 24, "%24", "%25", "%26")
JAX_FP8GEMM_WGMMA(56, 28, "%28", "%29", "%30")
JAX_FP8GEMM_WGMMA(64, 32, "%32", "%33", "%34")
JAX_FP8GEMM_WGMMA(72, 36, "%36", "%37", "%38")
JAX_FP8GEMM_WGMMA(80, 40, "%40", "%41", "%42")
JAX_FP8GEMM_WGMMA(88, 44, "%44", "%45", "%46")
JAX_FP8GEMM_WGMMA(96, 48, "%48", "%49", "%50")
JAX_FP8GEMM_WGMMA(104, 52, "%52", "%53", "%54")
JAX_FP8GEMM_WGMMA(112, 56, "%56", "%57", "%58")
JAX_FP8GEMM_WGMMA(120, 60, "%60", "%61", "%62")
JAX_FP8GEMM_WGMMA(128, 64, "%64", "%65", "%66")
JAX_FP8GEMM_WGMMA(144, 72, "%72", "%73", "%74")
JAX_FP8GEMM_WGMMA(160, 80, "%80", "%81", "%82")
JAX_FP8GEMM_WGMMA(192, 96, "%96", "%97", "%98")

#undef JAX_FP8GEMM_WGMMA
#undef JAX_FP8GEMM_WGMMA_TYPES
#undef JAX_FP8GEMM_DESCRIPTOR_UPPER

// Queues the product of one k-block, 128 of k, as a group of its own.
template <int kN, bool kExchanged = false>
__device__ __forceinline__ void multiply_k_block(float (&d)[kN / 2], uint32_t lhs_descriptor,
                                                 uint32_t rhs_descriptor) {
  wgmma_fence();
  Wgmma<kN>::template run<true, kExchanged>(d, lhs_descriptor, rhs_descriptor);
#pragma unroll
  for (int step = 1; step < 4; ++step) {
    Wgmma<kN>::template run<false, kExchanged>(d, lhs_descriptor + step * 2,
                                               rhs_descriptor + step * 2);
  }
  wgmma_commit();
}

}  // namespace jax_fp8gemm
