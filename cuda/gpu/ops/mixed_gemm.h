// GEMM of an fp32 and a bf16 matrix on tensor cores: the gradients of a router in a bf16 model.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Whether sm80_mixed_gemm supports a product: c[m, n] = a[m, k] b[k, n] in bf16 with k <= 256 (gradient of tokens), or
/// c[m, n] = aᵀ b in fp32 with m a multiple of 32 (weight gradient); a is fp32, b is bf16, rows are aligned to 16
/// bytes.
bool mixed_gemm_fits(const mimo_gemm_args& args);

/// Splits the fp32 matrix into three bf16 matrices that add up to it exactly, so all products are exact; sums are fp32.
void sm80_mixed_gemm(mimo_stream& stream, const mimo_gemm_args& args);

}  // namespace mimo::cuda
