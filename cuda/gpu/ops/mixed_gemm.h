// Products of an fp32 and a bf16 matrix on tensor cores: the gradients of a router in a bf16 model.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Whether sm80_mixed_gemm takes a product: fp32 times bf16 with a bf16 result and at most 256 summed terms (gradients of
/// tokens), or the transpose of fp32 times bf16 with an fp32 result of rows in multiples of 32 (a gradient of weights). Rows
/// are whole pieces of 16 bytes.
bool mixed_gemm_fits(const mimo_gemm_args& args);

/// Such a product. The fp32 matrix is cut into three bf16 parts that add up to it exactly, so all products are exact and the
/// sums are fp32.
void sm80_mixed_gemm(mimo_stream& stream, const mimo_gemm_args& args);

}  // namespace mimo::cuda
