// Kernels behind grouped_gemm and grouped_gemm_weight_gradient, by architecture and storage type. The groups' offsets
// stay on the device: each block looks up its group.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Any storage types, without tensor cores.
void grouped_gemm_plain(mimo_stream& stream, const mimo_grouped_gemm_args& args);
void grouped_gemm_weight_gradient_plain(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

/// bf16 operands with 16-byte aligned rows, sm_80 and later. grouped_gemm's result may be f32 or bf16.
void sm80_bf16_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args);
void sm80_bf16_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

/// sm_90a (TMA, wgmma), where sm90_grouped_gemm_fits: operands as above; c and dw aligned to 16 bytes too.
bool sm90_grouped_gemm_fits(const mimo_stream& stream, int64_t rows, int64_t groups, int64_t n, int64_t k);
void sm90_bf16_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args);
void sm90_bf16_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

/// With a quantised here and b in e4m3.
bool sm90_e4m3_grouped_gemm_fits(const mimo_stream& stream, const mimo_grouped_gemm_args& args);
void sm90_e4m3_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args);

/// Weight gradient with e4m3 products; takes bf16 operands and quantises them itself.
bool sm90_e4m3_grouped_gemm_weight_gradient_fits(const mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);
void sm90_e4m3_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

}  // namespace mimo::cuda
