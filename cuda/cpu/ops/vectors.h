// Vectors of fp32 lanes as wide as the processor's, and loops over the short rows of heads and chunks.
#pragma once
#include <immintrin.h>

#include "kernel.h"

namespace mimo::MIMO_ISA {

#if defined(__AVX512F__)
constexpr int64_t lanes = 16;
#else
constexpr int64_t lanes = 8;
#endif

typedef float Vector __attribute__((vector_size(lanes * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef uint16_t HalfVector __attribute__((vector_size(lanes * sizeof(uint16_t)), aligned(sizeof(uint16_t)), may_alias));
typedef uint32_t WordVector __attribute__((vector_size(lanes * sizeof(uint32_t))));

static inline Vector load_vector(const float* from) { return *reinterpret_cast<const Vector*>(from); }
static inline Vector load_vector(const bf16* from) {
  const WordVector bits = __builtin_convertvector(*reinterpret_cast<const HalfVector*>(from), WordVector) << 16;
  return reinterpret_cast<Vector>(bits);
}

// As one store: element by element, GCC goes through a copy on the stack.
static inline void store_vector(float* to, Vector values) { *reinterpret_cast<Vector*>(to) = values; }
/// Rounds as store().
static inline void store_vector(bf16* to, Vector values) {
  const WordVector bits = reinterpret_cast<WordVector>(values);
  const WordVector half = values == values ? 0x7FFFu + ((bits >> 16) & 1u) : WordVector{};
  *reinterpret_cast<HalfVector*>(to) = __builtin_convertvector((bits + half) >> 16, HalfVector);
}

/// The lanes of a vector folded to four. No AVX-512 half extraction intrinsics: GCC 12 warns about them.
static inline __m128 folded(Vector sums) {
  typedef float Eight __attribute__((vector_size(32)));
#if defined(__AVX512F__)
  const Eight half = __builtin_shufflevector(sums, sums, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(sums, sums, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const Eight half = sums;
#endif
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
}

/// Sums over the lanes of four vectors.
static inline __m128 four_sums(const Vector* sums) {
  __m128 a = folded(sums[0]), b = folded(sums[1]), c = folded(sums[2]), d = folded(sums[3]);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  return _mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d));
}

/// The sum over the lanes of a vector.
static inline float vector_sum(Vector sums) {
  const __m128 four = folded(sums), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/// Calls body(i) for i in [0, count), for rows as short as a head, where a plain loop takes longer to set up than to
/// run. `body` captures by copy, so that the compiler knows that its pointers do not change.
template <class Body>
static inline void short_loop(int64_t count, Body body) {
  constexpr int64_t run = 16;
  int64_t i = 0;
  for (; i + run <= count; i += run) {
#pragma omp simd
    for (int64_t k = 0; k < run; ++k) body(i + k);
  }
  if (i == count) return;
#pragma omp simd
  for (int64_t k = i; k < count; ++k) body(k);
}

/// Σ a[i] over whole vectors. The compiler's own reduction would add the lanes sequentially.
static inline float sum_of_vectors(const float* a, int64_t count) {
  Vector sums{};
  for (int64_t i = 0; i < count; i += lanes) sums += load_vector(a + i);
  return vector_sum(sums);
}

/// Σ a[i] b[i].
template <class T>
static inline float short_dot(const T* a, const float* b, int64_t count) {
  Vector sums{};
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) sums += load_vector(a + i) * load_vector(b + i);
  float sum = vector_sum(sums);
  for (; i < count; ++i) sum += load(a[i]) * b[i];
  return sum;
}

/// out[r] = Σ_i a[r][i] b[r][i] for contiguous rows; four rows share a lane reduction.
static inline void row_dots(const float* a, const float* b, int64_t rows, int64_t width, float* out) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    Vector sums[4] = {};
    int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; ++k) {
        const int64_t at = (r + k) * width + i;
        sums[k] += load_vector(a + at) * load_vector(b + at);
      }
    }
    _mm_storeu_ps(out + r, four_sums(sums));
    for (int64_t k = r; i < width && k < r + 4; ++k) {
      for (int64_t rest = i; rest < width; ++rest) out[k] += a[k * width + rest] * b[k * width + rest];
    }
  }
  for (; r < rows; ++r) out[r] = short_dot(a + r * width, b + r * width, width);
}

/// 0, 1, 2, … along the lanes.
static inline Vector lane_numbers() {
  Vector numbers{};
  for (int64_t i = 0; i < lanes; ++i) numbers[i] = static_cast<float>(i);
  return numbers;
}

/// Σ over [0, count): at(i) returns the terms of the vector from i on, one(i) the single term i after the last whole
/// vector. For rows of some hundred elements, where a plain loop's prologue and epilogue take as long as the sum.
template <class At, class One>
static inline float row_sum(int64_t count, At at, One one) {
  Vector sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < 4; ++k) sums[k] += at(i + k * lanes);
  }
  for (; i + lanes <= count; i += lanes) sums[0] += at(i);
  float sum = vector_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) sum += one(i);
  return sum;
}

/// Calls at(i) for every whole vector of [0, count) and one(i) for each element after them.
template <class At, class One>
static inline void row_loop(int64_t count, At at, One one) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) at(i);
  for (; i < count; ++i) one(i);
}

}  // namespace mimo::MIMO_ISA
