// Numbers in e4m3: 4 bits of exponent, 3 of mantissa, largest 448, no infinity (docs/spec/moe-performance.md §1.7).
#pragma once
#include <cmath>
#include <cstring>

#include "kernel.h"

namespace mimo::MIMO_ISA {

/// Columns of a run, and rows and columns of a block.
constexpr int64_t e4m3_run = 128;

/// To nearest, ties to even; beyond the largest number the largest, and what is not finite is NaN.
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

/// The byte of a number that is one of e4m3's.
inline uint8_t e4m3_byte(float x) {
  if (std::isnan(x)) return 0x7F;
  const auto sign = static_cast<uint8_t>(std::signbit(x) ? 0x80 : 0);
  const float magnitude = std::fabs(x);
  if (magnitude < 0x1p-6f) return static_cast<uint8_t>(sign | static_cast<uint8_t>(magnitude * 0x1p9f));
  uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof(bits));
  return static_cast<uint8_t>(sign | ((bits >> 20) - ((127 - 7) << 3)));
}

/// The number of a byte.
inline float e4m3_number(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 0x7F) == 0x7F) return NAN;
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

/// The largest power of two that leaves `magnitude` within the largest number; its inverse is a number too.
inline float e4m3_power(float magnitude) {
  constexpr float largest = 448.0f;
  if (!(magnitude > 0.0f) || !(magnitude < INFINITY)) return 1.0f;
  const float ratio = largest / magnitude;
  return ratio < 0x1p126f ? std::ldexp(1.0f, std::ilogb(ratio)) : 0x1p126f;
}

}  // namespace mimo::MIMO_ISA
