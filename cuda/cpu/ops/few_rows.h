// Products of a few rows with a large matrix stored [n, k], as in decoding. Memory-bound: the matrix is read once, as
// stored, whereas OpenBLAS would copy it first. The summation order depends on k alone, so a row's results do not
// depend on the other rows.
#pragma once
#include "vectors.h"

namespace mimo::MIMO_ISA {

/// Up to this number of rows this is faster than OpenBLAS.
constexpr int64_t few_rows = 16;

/// c[r][j] = Σ_i a[r][i] b[j][i] for R rows of a and C rows of b, C a multiple of 4.
template <int R, int C, class B>
void few_dots(const float* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t k, float* c, int64_t c_stride) {
  constexpr int64_t ahead = 1024;  // prefetch distance in bytes
  Vector sums[R][C] = {};
  int64_t i = 0;
  for (; i + lanes <= k; i += lanes) {
    Vector right[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      right[j] = load_vector(b + j * b_stride + i);
      __builtin_prefetch(reinterpret_cast<const char*>(b + j * b_stride + i) + ahead);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vector left = load_vector(a + r * a_stride + i);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sums[r][j] += left * right[j];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < C; j += 4) _mm_storeu_ps(c + r * c_stride + j, four_sums(sums[r] + j));
  }
  if (i == k) return;
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) {
      for (int64_t rest = i; rest < k; ++rest) c[r * c_stride + j] += a[r * a_stride + rest] * load(b[j * b_stride + rest]);
    }
  }
}

/// c[r][j] = Σ_i a[r][i] b[j][i] for all rows of a and `columns` rows of b.
template <class B>
void multiply_few_rows(const float* a, int64_t a_stride, int64_t rows, const B* b, int64_t b_stride, int64_t columns,
                       int64_t k, float* c, int64_t c_stride) {
#if defined(__AVX512F__)
  constexpr int tile = 4;
#else
  constexpr int tile = 2;  // 16 registers
#endif
  const auto tiles = [&](auto width, int64_t j, float* to, int64_t to_stride) {
    int64_t r = 0;
    for (; r + tile <= rows; r += tile) {
      few_dots<tile, 4>(a + r * a_stride, a_stride, b + j * b_stride, b_stride, k, to + r * to_stride, to_stride);
      if (width == 8) {
        few_dots<tile, 4>(a + r * a_stride, a_stride, b + (j + 4) * b_stride, b_stride, k, to + r * to_stride + 4,
                          to_stride);
      }
    }
    for (; r < rows; ++r) {
      few_dots<1, width>(a + r * a_stride, a_stride, b + j * b_stride, b_stride, k, to + r * to_stride, to_stride);
    }
  };
  int64_t j = 0;
  for (; j + 8 <= columns; j += 8) tiles(std::integral_constant<int, 8>{}, j, c + j, c_stride);
  for (; j + 4 <= columns; j += 4) tiles(std::integral_constant<int, 4>{}, j, c + j, c_stride);
  for (; j < columns; ++j) {
    // The same row four times keeps the order of the sums.
    for (int64_t r = 0; r < rows; ++r) {
      float same[4];
      few_dots<1, 4>(a + r * a_stride, a_stride, b + j * b_stride, 0, k, same, 4);
      c[r * c_stride + j] = same[0];
    }
  }
}

/// Rows of b in a task: 256 KiB, from sizes alone.
static inline int64_t few_rows_grain(int64_t k, int64_t element_bytes) {
  const int64_t rows = (int64_t{1} << 18) / (k * element_bytes + 1);
  return rows < 8 ? 8 : rows / 8 * 8;
}

}  // namespace mimo::MIMO_ISA
