// Kernels behind grouped_gemm and grouped_gemm_weight_gradient, by hardware and storage type. All take the groups' rows
// from the device: a block finds its group itself.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Products of any storage types, without tensor cores.
void grouped_gemm_plain(mimo_stream& stream, const mimo_grouped_gemm_args& args);
void grouped_gemm_weight_gradient_plain(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

/// bf16 operands with rows of whole 16-byte pieces, sm_80 and later. grouped_gemm's result may be f32 or bf16.
void sm80_bf16_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args);
void sm80_bf16_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

/// Grouped products on sm_90 through its own instructions, where sm90_grouped_gemm_fits: operands as above, c and dw on 16
/// bytes too.
bool sm90_grouped_gemm_fits(const mimo_stream& stream, int64_t rows, int64_t groups, int64_t n, int64_t k);
void sm90_bf16_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args);
void sm90_bf16_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

/// The gradient of matrices in e4m3, of operands in bf16 that are rounded here.
bool sm90_e4m3_grouped_gemm_weight_gradient_fits(const mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);
void sm90_e4m3_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

}  // namespace mimo::cuda
