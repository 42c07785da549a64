// Products of experts whose operands are rounded to e4m3 in blocks (docs/spec/moe-performance.md §1.7): plain code, that shows
// the effect of rounding.
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

/// c_g = a_g b_gᵀ of rows a [rows, k] and matrices b [groups, n, k] in e4m3. Rows are rounded here unless they are given rounded,
/// as moe_permute writes them.
struct E4m3Product {
  const void* a;
  const uint8_t* a_e4m3;  // or null
  const float* a_factors;
  const uint8_t* b;
  const float* b_factors;  // of e4m3_matrices
  bool transposed;         // b: then its factors are [groups, blocks of k, blocks of n]
  void* c;
  const int32_t* offsets;
  int64_t rows, groups, n, k;  // rows: upper bound of offsets[groups]
  int32_t a_dtype, c_dtype;
};
void e4m3_grouped_product(mimo_stream& stream, const E4m3Product& product);

/// grouped_gemm_weight_gradient of MIMO_MLP_RECIPE_E4M3_BLOCKWISE.
void e4m3_grouped_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

}  // namespace mimo::MIMO_ISA
