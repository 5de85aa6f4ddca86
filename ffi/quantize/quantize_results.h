// The results of a quantisation: what each mode has, and the addresses that its kernel gets.

#ifndef JAX_FP8GEMM_QUANTIZE_QUANTIZE_RESULTS_H_
#define JAX_FP8GEMM_QUANTIZE_QUANTIZE_RESULTS_H_

#include "quantize/quantize_config.h"
#include "quantize/quantize_params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// Sets the addresses of the results in `params`, which has m, k and num_columns, after a check of
// every result. `x`: the first operand.
ffi::Error BindQuantizeResults(const QuantizeConfig& config, const ffi::AnyBuffer& x,
                               const ffi::RemainingRets& results, QuantizeParams& params);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_QUANTIZE_QUANTIZE_RESULTS_H_
