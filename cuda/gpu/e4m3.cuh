// Rounding to e4m3, for kernels (docs/spec/moe-performance.md §1.7).
#pragma once
#include <cuda_fp8.h>

#include "e4m3.h"
#include "kernel.cuh"

namespace mimo::cuda {

constexpr int run = static_cast<int>(e4m3_run);

/// The exponent of the largest power of two that leaves `largest` at 448 = 1.75 x 2^8 or below; 0 for 0. Bounded so that the
/// power and its inverse are normal numbers.
__device__ __forceinline__ int power_for(float largest) {
  if (largest == 0.0f) return 0;
  const uint32_t bits = __float_as_uint(largest);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  return max(-126, min(126, ((bits & 0x7FFFFFu) <= 0x600000u ? 8 : 7) - exponent));
}
/// What a run with this largest magnitude is multiplied by. Infinity makes NaN of it: e4m3 knows no infinity.
__device__ __forceinline__ float factor_for(float largest, int power) {
  return largest < INFINITY ? __uint_as_float(static_cast<uint32_t>(127 + power) << 23) : NAN;
}
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23); }

__device__ __forceinline__ float largest_of(const float (&value)[8]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(value[i]));
  return largest;
}
__device__ __forceinline__ uint2 eight_e4m3(const float (&value)[8], float factor) {
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = __nv_cvt_float2_to_fp8x2(make_float2(value[2 * i] * factor, value[2 * i + 1] * factor), __NV_SATFINITE, __NV_E4M3);
  }
  return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}

/// Writes a run that sixteen neighbouring lanes hold, eight columns each, and its factor. All lanes of the warp call; values
/// of lanes that do not live are 0.
__device__ __forceinline__ void store_run(const float (&value)[8], uint8_t* values, float* factor, bool lives) {
  float largest = largest_of(value);
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, offset));
  const int power = power_for(largest);
  if (!lives) return;
  *reinterpret_cast<uint2*>(values) = eight_e4m3(value, factor_for(largest, power));
  if (threadIdx.x % 16 == 0) *factor = power_of_two(-power);
}

}  // namespace mimo::cuda
