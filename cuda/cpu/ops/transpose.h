// Transposed fp32 copies, for products whose operand is stored in the slower order.
#pragma once
#include <immintrin.h>

#include "kernel.h"

namespace mimo::MIMO_ISA {

static inline __m256 load_8(const float* from) { return _mm256_loadu_ps(from); }
static inline __m256 load_8(const bf16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/// to[i][r] = from[r][i] for 8 rows and 8 columns. Intrinsics, because compilers turn the plain loops into gathers.
template <class T>
void transpose_8x8(const T* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m256 pairs[8], quads[8];
  for (int r = 0; r < 8; r += 2) {
    const __m256 even = load_8(from + r * from_stride), odd = load_8(from + (r + 1) * from_stride);
    pairs[r] = _mm256_unpacklo_ps(even, odd);
    pairs[r + 1] = _mm256_unpackhi_ps(even, odd);
  }
  for (int half = 0; half < 2; ++half) {
    for (int high = 0; high < 2; ++high) {
      const __m256 first = pairs[4 * half + high], second = pairs[4 * half + 2 + high];
      quads[4 * half + 2 * high] = _mm256_shuffle_ps(first, second, 0x44);
      quads[4 * half + 2 * high + 1] = _mm256_shuffle_ps(first, second, 0xEE);
    }
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x20));
    _mm256_storeu_ps(to + (4 + i) * to_stride, _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x31));
  }
}

/// to[i][r] = from[r][i]: [rows, width] with `stride` becomes contiguous [width, rows].
template <class T>
void transpose(const T* from, int64_t stride, int64_t rows, int64_t width, float* to) {
  const int64_t whole_rows = rows / 8 * 8, whole_width = width / 8 * 8;
  for (int64_t i = 0; i < whole_width; i += 8) {
    for (int64_t r = 0; r < whole_rows; r += 8) transpose_8x8(from + r * stride + i, stride, to + i * rows + r, rows);
    for (int64_t r = whole_rows; r < rows; ++r)
      for (int64_t j = i; j < i + 8; ++j) to[j * rows + r] = load(from[r * stride + j]);
  }
  for (int64_t i = whole_width; i < width; ++i)
    for (int64_t r = 0; r < rows; ++r) to[i * rows + r] = load(from[r * stride + i]);
}

}  // namespace mimo::MIMO_ISA
