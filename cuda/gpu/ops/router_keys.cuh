// Exact top-k over a token's experts by a warp: keys that order the candidates, and their selection.
#pragma once
#include "router.cuh"

namespace mimo::cuda {

// Keys order the candidates: larger values first, -0 equal to 0, NaN and -infinity last; key 0 marks no candidate.
// Scores with a bias or groups are compared in fp64, as in the CPU library: scores around 0.5 often differ by less than
// fp32 resolves.
using Key32 = uint32_t;
using Key64 = unsigned long long;
constexpr int last_key = 1;

__device__ __forceinline__ Key32 key_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
  return value > -INFINITY ? bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u) : last_key;
}
__device__ __forceinline__ Key64 key_of(double value) {
  const Key64 bits = static_cast<Key64>(__double_as_longlong(value + 0.0));
  const Key64 flip = static_cast<Key64>(static_cast<long long>(bits) >> 63) | 1ull << 63;
  return value > -INFINITY ? bits ^ flip : last_key;
}
__device__ __forceinline__ float value_of(Key32 key) {
  return key <= last_key ? -INFINITY : __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}
__device__ __forceinline__ double value_of(Key64 key) {
  if (key <= last_key) return -INFINITY;
  return __longlong_as_double(static_cast<long long>((key >> 63) != 0 ? key ^ 1ull << 63 : ~key));
}

__device__ __forceinline__ Key32 largest_of_warp(Key32 key) { return __reduce_max_sync(all_lanes, key); }
__device__ __forceinline__ Key64 largest_of_warp(Key64 key) {
  const uint32_t upper = static_cast<uint32_t>(key >> 32), most = __reduce_max_sync(all_lanes, upper);
  const uint32_t lower = __reduce_max_sync(all_lanes, upper == most ? static_cast<uint32_t>(key) : 0u);
  return static_cast<Key64>(most) << 32 | lower;
}

/// Selects the warp's k largest keys; bit j of the result is set if key[j] of this lane is among them. Lanes own
/// consecutive candidates; ties go to the lowest index. Calls take(key) for each of the k, largest first.
template <int Own, class Key, class Take>
__device__ __forceinline__ unsigned take_best(const Key (&key)[Own], int64_t k, Take&& take) {
  Key sorted[Own];  // descending, so that the lane's next candidate is always the first
#pragma unroll
  for (int j = 0; j < Own; ++j) sorted[j] = key[j];
#pragma unroll
  for (int last = Own - 1; last > 0; --last) {
#pragma unroll
    for (int j = 0; j < last; ++j) {
      const Key first = max(sorted[j], sorted[j + 1]);
      sorted[j + 1] = min(sorted[j], sorted[j + 1]);
      sorted[j] = first;
    }
  }
  const unsigned lower_lanes = (1u << lane_id()) - 1u;
  int count = 0;       // number of this lane's keys taken so far,
  Key least = ~Key{0};  // and the smallest of them; larger than any key at first
  for (int64_t i = 0; i < k; ++i) {
    const Key best = largest_of_warp(sorted[0]);
    const bool holds = sorted[0] == best;
    if ((__ballot_sync(all_lanes, holds) & lower_lanes) == 0 && holds) {
      ++count;
      least = best;
#pragma unroll
      for (int j = 0; j + 1 < Own; ++j) sorted[j] = sorted[j + 1];
      sorted[Own - 1] = 0;
    }
    take(best);
  }
  unsigned taken = 0;
#pragma unroll
  for (int j = 0; j < Own; ++j) taken |= (key[j] >= least ? 1u : 0u) << j;
  if (__popc(taken) == count) return taken;
  // Of several keys equal to the smallest, the first ones are chosen.
  int spare = __popc(taken) - count;
#pragma unroll
  for (int j = Own - 1; j >= 0; --j) {
    if (spare > 0 && key[j] == least) taken &= ~(1u << j), --spare;
  }
  return taken;
}
template <int Own, class Key>
__device__ __forceinline__ unsigned take_best(const Key (&key)[Own], int64_t k) {
  return take_best(key, k, [](Key) {});
}

}  // namespace mimo::cuda
