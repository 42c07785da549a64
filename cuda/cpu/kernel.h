// Included by every CPU kernel file. The files in ops/ are compiled twice, for AVX2 and for AVX-512, into the namespace
// MIMO_ISA; everything here except plain types is in it too, so that the linker never mixes code of the two. Kernels
// vectorise with `#pragma omp simd` (no OpenMP run time).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "device.h"
#include "require.h"

#ifndef MIMO_ISA
#error "kernel files are compiled with -DMIMO_ISA=avx2 or avx512"
#endif

namespace mimo {

/// bfloat16: the upper half of an fp32.
struct bf16 {
  uint16_t bits;
};

namespace MIMO_ISA {

static inline float load(float value) { return value; }
static inline float load(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}
static inline void store(float* to, float value) { *to = value; }
/// Rounds to nearest, ties to even. NaN is truncated instead, and stays NaN because results of arithmetic are quiet
/// NaNs.
static inline void store(bf16* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t half = value == value ? 0x7FFFu + ((bits >> 16) & 1u) : 0u;
  to->bits = static_cast<uint16_t>((bits + half) >> 16);
}

// Bounds within which exp is a normal, finite number.
constexpr float lowest_exponent = -87.3365402f, highest_exponent = 88.7228317f;

template <class Floats>
static inline Floats clamp_exponent(Floats x) {
  const Floats raised = x < lowest_exponent ? Floats{} + lowest_exponent : x;
  return raised > highest_exponent ? Floats{} + highest_exponent : raised;
}

/// exp between these bounds to 1.03 ulp, vectorisable; of a float, or of a vector with Words of as many 32-bit
/// integers.
template <class Words = uint32_t, class Floats>
static inline Floats exp_in_range(Floats x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5·2²³ rounds n to an integer.
  const Floats shifted = x * 1.44269504088896341f + 12582912.0f;
  const Floats n = shifted - 12582912.0f;
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // Scales by 2ⁿ on the exponent bits: the factor 2ⁿ would overflow at n = 128, where p < 1 makes the product finite.
  Words shift, bits;
  std::memcpy(&shift, &shifted, sizeof(shift));
  std::memcpy(&bits, &p, sizeof(bits));
  bits += shift << 23;
  Floats y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

/// exp for any x. Results below the smallest normal number are 0, above the largest infinity; NaN stays NaN.
static inline float exp_fast(float x) {
  const float y = exp_in_range(clamp_exponent(x));
  return x < lowest_exponent ? 0.0f : (x > highest_exponent ? INFINITY : (x != x ? x : y));
}

/// Clamping suffices for σ: beyond exp's range 1 / (1 + e) is 1, or below 1e-38 like σ itself. NaN stays NaN.
template <class Words = uint32_t, class Floats>
static inline Floats sigmoid(Floats x) {
  const Floats y = 1.0f / (1.0f + exp_in_range<Words>(clamp_exponent(-x)));
  return x != x ? x : y;
}

/// Calls `body` with a null pointer that carries the storage type: float* or bf16*.
template <class Body>
static inline void with_dtype(int32_t dtype, Body&& body) {
  if (dtype == MIMO_DTYPE_F32) {
    body(static_cast<float*>(nullptr));
  } else if (dtype == MIMO_DTYPE_BF16) {
    body(static_cast<bf16*>(nullptr));
  } else {
    fail(MIMO_ERROR_ARGUMENT, "An operation takes f32 or bf16 storage only.");
  }
}

struct Sums {
  float first, second;
};

/// Σ over i in [0, count) of the two terms that value(i, first, second) sets, in unspecified order: 32 running sums
/// added as a tree, because the compiler's own reduction waits for each addition and adds the lanes sequentially.
/// `value` captures by copy, so that the compiler knows that its pointers do not change. Not inlined, because GCC 12
/// would then keep the sums in memory.
template <class Value>
__attribute__((noinline)) static Sums sums_over(int64_t count, Value value) {
  constexpr int64_t lanes = 32;
  float first[lanes], second[lanes];
  int64_t i = 0;
  if (count >= lanes) {
    // The first terms initialise the sums: GCC would clear the arrays with an instruction as slow as summing a short
    // row.
#pragma omp simd
    for (int64_t j = 0; j < lanes; ++j) {
      float a = 0, b = 0;
      value(j, a, b);
      first[j] = a;
      second[j] = b;
    }
    i = lanes;
  } else {
    for (int64_t j = 0; j < lanes; ++j) first[j] = second[j] = 0;
  }
  for (; i + lanes <= count; i += lanes) {
#pragma omp simd
    for (int64_t j = 0; j < lanes; ++j) {
      float a = 0, b = 0;
      value(i + j, a, b);
      first[j] += a;
      second[j] += b;
    }
  }
  if (i < count) {
#pragma omp simd
    for (int64_t j = 0; j < count - i; ++j) {
      float a = 0, b = 0;
      value(i + j, a, b);
      first[j] += a;
      second[j] += b;
    }
  }
  for (int64_t width = lanes / 2; width >= 4; width /= 2) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      first[j] += first[j + width];
      second[j] += second[j + width];
    }
  }
  return {(first[0] + first[2]) + (first[1] + first[3]), (second[0] + second[2]) + (second[1] + second[3])};
}

/// Σ value(i) over [0, count): sums_over for one term, with 64 running sums.
template <class Value>
__attribute__((noinline)) static float sum_over(int64_t count, Value value) {
  constexpr int64_t lanes = 64;
  float sums[lanes];
  int64_t i = 0;
  if (count >= lanes) {
#pragma omp simd
    for (int64_t j = 0; j < lanes; ++j) sums[j] = value(j);
    i = lanes;
  } else {
    for (int64_t j = 0; j < lanes; ++j) sums[j] = 0;
  }
  for (; i + lanes <= count; i += lanes) {
#pragma omp simd
    for (int64_t j = 0; j < lanes; ++j) sums[j] += value(i + j);
  }
  if (i < count) {
#pragma omp simd
    for (int64_t j = 0; j < count - i; ++j) sums[j] += value(i + j);
  }
  for (int64_t width = lanes / 2; width >= 4; width /= 2) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/// Largest value(i) over [0, count), -infinity if empty; ignores NaN. 32 running maxima, because Clang preserves the
/// order of a maximum that may meet NaN and does not vectorise the plain loop.
template <class Value>
__attribute__((noinline)) static float max_over(int64_t count, Value value) {
  constexpr int64_t lanes = 32;
  float highest[lanes];
  for (int64_t j = 0; j < lanes; ++j) highest[j] = -INFINITY;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
#pragma omp simd
    for (int64_t j = 0; j < lanes; ++j) {
      const float x = value(i + j);
      highest[j] = x > highest[j] ? x : highest[j];
    }
  }
  for (; i < count; ++i) {
    const float x = value(i);
    highest[0] = x > highest[0] ? x : highest[0];
  }
  for (int64_t half = lanes / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half; ++j) highest[j] = highest[j + half] > highest[j] ? highest[j + half] : highest[j];
  }
  return highest[0];
}

/// Number of short rows (or groups) of `width` elements, at most 32, that a norm sums before it writes their results:
/// the last additions and the square root of one row overlap the sums of the next.
static inline int64_t rows_per_batch(int64_t width) {
  constexpr int64_t elements = 1024;
  return width >= elements ? 1 : elements / width < 32 ? elements / width : 32;
}

/// Number of valid rows of an operation: *row_count if given, else `rows`.
static inline int64_t live_rows(int64_t rows, const int32_t* row_count) {
  if (row_count == nullptr) return rows;
  return *row_count < rows ? *row_count : rows;
}

/// Rows of a partial sum in reductions over rows, whatever the number of threads.
constexpr int64_t rows_per_partial = 64;

/// total[c] += Σ_p partial[p][c], in the order of p.
static inline void add_partials(mimo_stream& stream, const float* partial, int64_t partials, int64_t width,
                                float* total) {
  parallel_range(stream.device->threads, width, 256, [&](int64_t begin, int64_t end) {
    for (int64_t p = 0; p < partials; ++p) {
      const float* row = partial + p * width;
#pragma omp simd
      for (int64_t c = begin; c < end; ++c) total[c] += row[c];
    }
  });
}

}  // namespace MIMO_ISA
}  // namespace mimo
