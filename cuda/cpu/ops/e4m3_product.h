// Grouped products, of experts or of one projection, with block-quantised e4m3 operands (docs/spec/moe-performance.md §1.7): a plain reference
// that reproduces the effect of rounding.
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

/// c_g = a_g b_gᵀ for rows a [rows, k] and e4m3 matrices b [groups, n, k]. Rows are quantised here unless given
/// quantised, as moe_permute writes them.
struct E4m3Product {
  const void* a;
  const uint8_t* a_e4m3;  // or null
  const float* a_factors;
  const uint8_t* b;
  const float* b_factors;  // of e4m3_matrices
  bool transposed;         // of b; its factors then are [groups, blocks of k, blocks of n]
  void* c;
  const int32_t* offsets;
  int64_t rows, groups, n, k;  // rows: upper bound of offsets[groups]
  int32_t a_dtype, c_dtype;
};
void e4m3_grouped_product(mimo_stream& stream, const E4m3Product& product);

/// grouped_gemm_weight_gradient of MIMO_MLP_RECIPE_E4M3_BLOCKWISE.
void e4m3_grouped_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args);

}  // namespace mimo::MIMO_ISA
