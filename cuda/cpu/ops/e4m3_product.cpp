// Operands are rounded and scaled back at once: their factors are powers of two, which change no digit of a sum.
#include "e4m3_product.h"

#include <algorithm>

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t block = 128;
constexpr float largest = 448.0f, smallest_normal = 0x1p-6f, subnormal_step = 0x1p-9f;
constexpr int64_t float_bytes = static_cast<int64_t>(sizeof(float));

/// To nearest, ties to even; beyond the largest number the largest, and what is not finite is NaN.
float round_to_e4m3(float x) {
  const float magnitude = std::fabs(x);
  if (!(magnitude < INFINITY)) return NAN;
  if (magnitude >= largest) return std::copysign(largest, x);
  if (magnitude < smallest_normal) return std::copysign(std::nearbyint(magnitude / subnormal_step) * subnormal_step, x);
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x7FFFFu + ((bits >> 20) & 1u)) & ~0xFFFFFu;
  float rounded;
  std::memcpy(&rounded, &bits, sizeof(rounded));
  return rounded;
}

/// The power of two that brings `magnitude` to at most the largest number.
float factor_of(float magnitude) {
  if (!(magnitude > 0.0f) || !(magnitude < INFINITY)) return 1.0f;
  const float ratio = largest / magnitude;
  return ratio < INFINITY ? std::ldexp(1.0f, std::ilogb(ratio)) : 0x1p127f;
}

/// Rounds a rectangle of a [.., width] operand into the same places of `to`.
template <class T>
void round_rectangle(const T* from, int64_t width, int64_t rows, int64_t columns, float* to) {
  float magnitude = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; ++i) {
      const float x = std::fabs(load(from[r * width + i]));
      magnitude = x > magnitude ? x : magnitude;
    }
  }
  const float factor = factor_of(magnitude);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; ++i) to[r * width + i] = round_to_e4m3(load(from[r * width + i]) * factor) / factor;
  }
}

/// A [rows, width] operand in rectangles of `height` rows and 128 columns.
template <class T>
void round_operand(mimo_stream& stream, const T* from, int64_t rows, int64_t width, int64_t height, float* to) {
  parallel_for(stream.device->threads, (rows + height - 1) / height, [&](int64_t run) {
    const int64_t row = run * height, count = std::min(height, rows - row);
    for (int64_t column = 0; column < width; column += block) {
      const int64_t at = row * width + column;
      round_rectangle(from + at, width, count, std::min(block, width - column), to + at);
    }
  });
}

/// sums[n] of one row a[k]: b is [n, k].
void multiply_transposed(const float* a, const float* b, int64_t n, int64_t k, float* sums) {
  for (int64_t j = 0; j < n; ++j) {
    float sum = 0;
    for (int64_t i = 0; i < k; i += block) {
      const float *x = a + i, *y = b + j * k + i;
      sum += sum_over(std::min(block, k - i), [=](int64_t at) { return x[at] * y[at]; });
    }
    sums[j] = sum;
  }
}

/// The same for b [k, n]; `part` holds n floats.
void multiply_plain(const float* a, const float* b, int64_t n, int64_t k, float* sums, float* part) {
  std::fill(sums, sums + n, 0.0f);
  for (int64_t i = 0; i < k; i += block) {
    std::fill(part, part + n, 0.0f);
    for (int64_t at = i; at < std::min(k, i + block); ++at) {
      const float x = a[at];
      const float* y = b + at * n;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) part[j] += x * y[j];
    }
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) sums[j] += part[j];
  }
}

template <class T, class C>
void multiply_groups(mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  const int64_t n = args.n, k = args.k;
  Workspace matrix(&stream, n * k * float_bytes);
  for (int64_t g = 0; g < args.groups; ++g) {
    const int64_t begin = args.offsets[g], rows = args.offsets[g + 1] - begin;
    if (rows == 0) continue;
    Workspace own(&stream, rows * (k + 2 * n) * float_bytes);
    float* a = own.as<float>();
    float* sums = a + rows * k;
    round_operand(stream, static_cast<const T*>(args.a) + begin * k, rows, k, 1, a);
    const int64_t matrix_rows = args.transpose_b != 0 ? n : k, matrix_width = args.transpose_b != 0 ? k : n;
    round_operand(stream, static_cast<const T*>(args.b) + g * n * k, matrix_rows, matrix_width, block, matrix.as<float>());
    parallel_for(stream.device->threads, rows, [&](int64_t row) {
      float* sum = sums + 2 * row * n;
      if (args.transpose_b != 0) {
        multiply_transposed(a + row * k, matrix.as<float>(), n, k, sum);
      } else {
        multiply_plain(a + row * k, matrix.as<float>(), n, k, sum, sum + n);
      }
      C* to = static_cast<C*>(args.c) + (begin + row) * n;
      for (int64_t j = 0; j < n; ++j) store(&to[j], sum[j]);
    });
  }
}

}  // namespace

void e4m3_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  MIMO_REQUIRE(args.a_dtype == args.b_dtype && args.groups >= 1 && args.n >= 0 && args.k >= 1, "e4m3_grouped_gemm");
  with_dtype(args.a_dtype, [&](auto* t) {
    with_dtype(args.c_dtype, [&](auto* c) {
      using T = std::remove_pointer_t<decltype(t)>;
      multiply_groups<T, std::remove_pointer_t<decltype(c)>>(stream, args);
    });
  });
}

}  // namespace mimo::MIMO_ISA
