// The e4m3 format: 4 exponent bits, 3 mantissa bits, largest value 448, no infinity (docs/spec/moe-performance.md
// §1.7).
#pragma once
#include <cmath>
#include <cstring>

#include "kernel.h"

namespace mimo::MIMO_ISA {

/// Columns of a run; rows and columns of a block.
constexpr int64_t e4m3_run = 128;

/// Rounds to nearest, ties to even, saturating at the largest value; infinities become NaN.
inline float round_to_e4m3(float x) {
  constexpr float largest = 448.0f, smallest_normal = 0x1p-6f, subnormal_step = 0x1p-9f;
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

/// Encodes a value that is representable in e4m3.
inline uint8_t e4m3_byte(float x) {
  if (std::isnan(x)) return 0x7F;
  const auto sign = static_cast<uint8_t>(std::signbit(x) ? 0x80 : 0);
  const float magnitude = std::fabs(x);
  if (magnitude < 0x1p-6f) return static_cast<uint8_t>(sign | static_cast<uint8_t>(magnitude * 0x1p9f));
  uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof(bits));
  return static_cast<uint8_t>(sign | ((bits >> 20) - ((127 - 7) << 3)));
}

/// Decodes a byte.
inline float e4m3_number(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 0x7F) == 0x7F) return NAN;
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

/// Decoding table.
struct E4m3Numbers {
  float of_byte[256];
  E4m3Numbers() {
    for (int byte = 0; byte < 256; ++byte) of_byte[byte] = e4m3_number(static_cast<uint8_t>(byte));
  }
};

/// The largest power of two that scales `magnitude` to at most 448, bounded so that its inverse is finite.
inline float e4m3_power(float magnitude) {
  constexpr float largest = 448.0f;
  if (!(magnitude > 0.0f) || !(magnitude < INFINITY)) return 1.0f;
  const float ratio = largest / magnitude;
  return ratio < 0x1p126f ? std::ldexp(1.0f, std::ilogb(ratio)) : 0x1p126f;
}

/// Quantised rows in runs of 128 columns: bytes [rows, width] and factors [runs, factor_stride].
struct E4m3Rows {
  uint8_t* values;
  float* factors;
  int64_t factor_stride;
};
inline int64_t e4m3_runs(int64_t width) { return (width + e4m3_run - 1) / e4m3_run; }
/// Elements between the factors of consecutive runs.
inline int64_t e4m3_factor_stride(int64_t rows) { return (rows + 3) / 4 * 4; }

/// Decodes a row, without its factors.
inline void read_e4m3_row(const E4m3Numbers& numbers, const E4m3Rows& rows, int64_t row, int64_t width, float* to) {
  for (int64_t i = 0; i < width; ++i) {
    to[i] = numbers.of_byte[rows.values[row * width + i]] * rows.factors[i / e4m3_run * rows.factor_stride + row];
  }
}

/// Quantises a row to row `row` of `to`. Runs with an infinity become NaN.
template <class T>
void round_row_to_e4m3(const T* from, int64_t width, const E4m3Rows& to, int64_t row) {
  for (int64_t first = 0; first < width; first += e4m3_run) {
    const int64_t last = first + e4m3_run < width ? first + e4m3_run : width;
    float magnitude = 0;
    for (int64_t i = first; i < last; ++i) {
      const float x = std::fabs(load(from[i]));
      magnitude = x > magnitude ? x : magnitude;
    }
    const float power = magnitude < INFINITY ? e4m3_power(magnitude) : NAN;
    for (int64_t i = first; i < last; ++i) to.values[row * width + i] = e4m3_byte(round_to_e4m3(load(from[i]) * power));
    to.factors[first / e4m3_run * to.factor_stride + row] = std::isnan(power) ? 1.0f : 1 / power;
  }
}

/// Quantises the first `count` rows of `from`.
inline void round_rows_to_e4m3(mimo_stream& stream, const void* from, int32_t dtype, int64_t count, int64_t width, const E4m3Rows& to) {
  with_dtype(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_range(stream.device->threads, count, rows_per_partial, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) round_row_to_e4m3(static_cast<const T*>(from) + row * width, width, to, row);
    });
  });
}

}  // namespace mimo::MIMO_ISA
