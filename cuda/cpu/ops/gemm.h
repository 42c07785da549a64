// A block of a matrix product, for kernels with their own parallelisation (grouped experts, attention, chunk scan).
#pragma once
#include "openblas.h"

namespace mimo::MIMO_ISA {

struct Product {
  const float* a;
  const float* b;
  float* c;
  int64_t k, a_stride, b_stride, c_stride;
  float alpha, beta;
  bool transpose_a, transpose_b;
};

/// Computes c[row .. row + rows, column .. column + columns] on the calling thread.
void product(const Product& p, int64_t row, int64_t rows, int64_t column, int64_t columns);

}  // namespace mimo::MIMO_ISA
