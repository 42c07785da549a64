// Shared by the router kernels: softmax over one token's experts.
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

static inline float maximum(const float* x, int64_t n) {
  float best = -INFINITY;
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

static inline float sum(const float* x, int64_t n) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += x[i];
  return total;
}

/// y = exp(x - max x); returns Σ y.
static inline float exponentials(const float* x, float* y, int64_t n) {
  const float shift = maximum(x, n);
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    y[i] = exp_fast(x[i] - shift);
    total += y[i];
  }
  return total;
}

static inline float logsumexp(const float* x, int64_t n) {
  const float shift = maximum(x, n);
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += exp_fast(x[i] - shift);
  return shift + std::log(total);
}

/// Sequence of a token, searched forward from `q`: the last one that begins at or before it.
static inline int64_t sequence_of(int64_t token, const int32_t* cu_seqlens, int64_t sequences, int64_t q) {
  while (q + 1 < sequences && token >= cu_seqlens[q + 1]) ++q;
  return q;
}

}  // namespace mimo::MIMO_ISA
