// Device functions for quantisation to e4m3 (docs/spec/moe-performance.md §1.7).
#pragma once
#include <cuda_fp8.h>

#include "e4m3.h"
#include "kernel.cuh"

namespace mimo::cuda {

constexpr int run = static_cast<int>(e4m3_run);

/// Exponent of the largest power of two that scales `largest` to at most 448 = 1.75 x 2^8, the largest e4m3 value; 0
/// for 0. Bounded so that the power and its inverse are normal numbers.
__device__ __forceinline__ int power_for(float largest) {
  if (largest == 0.0f) return 0;
  const uint32_t bits = __float_as_uint(largest);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  return max(-126, min(126, ((bits & 0x7FFFFFu) <= 0x600000u ? 8 : 7) - exponent));
}
/// Dequantisation factor of a run with this amax; NaN for infinity, which e4m3 cannot represent.
__device__ __forceinline__ float factor_for(float largest, int power) {
  return largest < INFINITY ? __uint_as_float(static_cast<uint32_t>(127 + power) << 23) : NAN;
}
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23); }

template <int Width>
__device__ __forceinline__ float largest_of(const float (&value)[Width]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < Width; ++i) largest = fmaxf(largest, fabsf(value[i]));
  return largest;
}
/// Rounds to bf16 and back in pairs: conversions of single values run on the slower special function unit.
template <int Width>
__device__ __forceinline__ void round_to_bf16(float (&value)[Width]) {
#pragma unroll
  for (int i = 0; i < Width; i += 2) {
    const uint32_t pair = pack_bf16(value[i], value[i + 1]);
    value[i] = __uint_as_float(pair << 16), value[i + 1] = __uint_as_float(pair & 0xFFFF0000u);
  }
}
__device__ __forceinline__ uint2 eight_e4m3(const float* value, float factor) {
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = __nv_cvt_float2_to_fp8x2(make_float2(value[2 * i] * factor, value[2 * i + 1] * factor), __NV_SATFINITE, __NV_E4M3);
  }
  return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}

__device__ __forceinline__ void read_e4m3(const uint2& bytes, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = i < 2 ? bytes.x : bytes.y;
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(word >> (i % 2 * 16)), __NV_E4M3);
    const float2 two = __half22float2(static_cast<__half2>(raw));
    to[2 * i] = two.x, to[2 * i + 1] = two.y;
  }
}

/// 8 x 8 byte transpose: byte[i][j] becomes byte[j][i].
__device__ __forceinline__ void turn(uint2 (&byte)[8]) {
  const auto turn_4 = [](uint32_t (&word)[4]) {
    const uint32_t low01 = __byte_perm(word[0], word[1], 0x5140), high01 = __byte_perm(word[0], word[1], 0x7362);
    const uint32_t low23 = __byte_perm(word[2], word[3], 0x5140), high23 = __byte_perm(word[2], word[3], 0x7362);
    word[0] = __byte_perm(low01, low23, 0x5410), word[1] = __byte_perm(low01, low23, 0x7632);
    word[2] = __byte_perm(high01, high23, 0x5410), word[3] = __byte_perm(high01, high23, 0x7632);
  };
  uint32_t quarter[2][2][4];  // of rows, of columns
#pragma unroll
  for (int i = 0; i < 8; ++i) quarter[i / 4][0][i % 4] = byte[i].x, quarter[i / 4][1][i % 4] = byte[i].y;
#pragma unroll
  for (int i = 0; i < 4; ++i) turn_4(quarter[i / 2][i % 2]);
#pragma unroll
  for (int i = 0; i < 8; ++i) byte[i] = make_uint2(quarter[0][i / 4][i % 4], quarter[1][i / 4][i % 4]);
}

/// Eight bf16 as raw words: loads can be issued together and unpacked later.
__device__ __forceinline__ uint4 eight_bf16(const bf16* from) { return *reinterpret_cast<const uint4*>(from); }
__device__ __forceinline__ void read(const uint4& from, float (&to)[8]) { read(reinterpret_cast<const bf16*>(&from), to); }

/// A lane's quantised columns of a run, and the run's factor.
template <int Width>
struct RoundedColumns {
  uint2 bytes[Width / 8];
  float factor;
};
/// Quantises a run of 128 columns held by neighbouring lanes, 8 or 16 columns each. All lanes of the warp must call it;
/// lanes without columns pass zeros.
template <int Width>
__device__ __forceinline__ RoundedColumns<Width> round_run(const float (&value)[Width]) {
  static_assert(Width == 8 || Width == 16);
  float largest = largest_of(value);
#pragma unroll
  for (int offset = run / Width / 2; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, offset));
  }
  const int power = power_for(largest);
  const float by = factor_for(largest, power);
  RoundedColumns<Width> rounded;
#pragma unroll
  for (int i = 0; i < Width / 8; ++i) rounded.bytes[i] = eight_e4m3(value + 8 * i, by);
  rounded.factor = power_of_two(-power);
  return rounded;
}
/// Whether this lane writes its run's factor.
template <int Width>
__device__ __forceinline__ bool has_factor() {
  return threadIdx.x % (run / Width) == 0;
}

/// Quantises a run and stores values and factor; lanes with `lives` false store nothing.
template <int Width>
__device__ __forceinline__ void store_run(const float (&value)[Width], uint8_t* values, float* factor, bool lives) {
  const RoundedColumns<Width> rounded = round_run(value);
  if (!lives) return;
  const uint2 first = rounded.bytes[0];
  if constexpr (Width == 8) {
    *reinterpret_cast<uint2*>(values) = first;
  } else {
    const uint2 second = rounded.bytes[1];
    *reinterpret_cast<uint4*>(values) = make_uint4(first.x, first.y, second.x, second.y);
  }
  if (has_factor<Width>()) *factor = rounded.factor;
}

}  // namespace mimo::cuda
