// Products of experts whose operands are rounded to e4m3 in blocks (docs/spec/moe-performance.md §1.7): plain code, to see what
// the rounding does.
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

/// c_g = a_g b_gᵀ of rows a [rows, k] that are rounded here and matrices b [groups, n, k] in e4m3.
struct E4m3Product {
  const void* a;
  const uint8_t* b;
  const float* factors;  // of e4m3_matrices
  bool transposed;       // b: then factors are [groups, blocks of k, blocks of n]
  void* c;
  const int32_t* offsets;
  int64_t groups, n, k;
  int32_t a_dtype, c_dtype;
};
void e4m3_grouped_product(mimo_stream& stream, const E4m3Product& product);

}  // namespace mimo::MIMO_ISA
