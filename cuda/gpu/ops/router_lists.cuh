// k-th largest of a token's values by a few lanes: sorted lists in registers, merged across the lanes.
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

// NaN propagates through comparisons, and so to every result of a selection.
__device__ __forceinline__ float larger_of(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
__device__ __forceinline__ float smaller_of(float a, float b) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
}

/// Orders two values, the larger first.
__device__ __forceinline__ void order(float& first, float& second) {
  const float larger = larger_of(first, second);
  second = smaller_of(first, second);
  first = larger;
}

/// Batcher's odd-even merge sort of 8 values, descending.
__device__ __forceinline__ void sort_8(float (&v)[8]) {
#pragma unroll
  for (int p = 1; p < 8; p *= 2) {
#pragma unroll
    for (int k = p; k >= 1; k /= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool first = i >= k % p && (i - k % p) % (2 * k) < k && i + k < 8 && i / (2 * p) == (i + k) / (2 * p);
        if (first) order(v[i], v[i + k]);
      }
    }
  }
}

/// Bitonic merge: sorts a list that falls and then rises into descending order.
__device__ __forceinline__ void sort_valley(float (&v)[8]) {
#pragma unroll
  for (int distance = 4; distance >= 1; distance /= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & distance) == 0) order(v[i], v[i + distance]);
    }
  }
}
__device__ __forceinline__ void sort_valley(float (&v)[6]) {  // as if followed by two infinities
  order(v[0], v[4]), order(v[1], v[5]);
  order(v[4], v[2]), order(v[5], v[3]);
  order(v[0], v[1]), order(v[4], v[5]), order(v[2], v[3]);
  const float third = v[4], fourth = v[5];
  v[4] = v[2], v[5] = v[3], v[2] = third, v[3] = fourth;
}

/// The largest values of two descending lists, as a list that falls and then rises.
template <int List>
__device__ __forceinline__ void best_of(float (&list)[List], const float (&other)[List]) {
  float best[List];
#pragma unroll
  for (int i = 0; i < List; ++i) best[i] = larger_of(list[i], other[List - 1 - i]);
#pragma unroll
  for (int i = 0; i < List; ++i) list[i] = best[i];
}

/// The k-th largest of the team's values, `Own` in each lane; k <= List. NaN if any value is NaN.
template <int Lanes, int List, int Own>
__device__ __forceinline__ float kth_of_team(const float (&value)[Own], int k) {
  static_assert(Own % 8 == 0 && List <= 8, "lists are made of sorted eights");
  float list[List];
#pragma unroll
  for (int begin = 0; begin < Own; begin += 8) {
    float eight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = value[begin + i];
    sort_8(eight);
    float head[List];
#pragma unroll
    for (int i = 0; i < List; ++i) head[i] = eight[i];
    if (begin == 0) {
#pragma unroll
      for (int i = 0; i < List; ++i) list[i] = head[i];
    } else {
      best_of(list, head);
      sort_valley(list);
    }
  }
#pragma unroll
  for (int distance = 1; distance < Lanes; distance *= 2) {
    float other[List];
#pragma unroll
    for (int i = 0; i < List; ++i) other[i] = __shfl_xor_sync(all_lanes, list[i], distance);
    best_of(list, other);
    if (2 * distance < Lanes) sort_valley(list);
  }
  if (k == List) {
    float least = list[0];
#pragma unroll
    for (int i = 1; i < List; ++i) least = smaller_of(least, list[i]);
    return least;
  }
  sort_valley(list);
  float kth = list[0];
#pragma unroll
  for (int i = 1; i < List; ++i) kth = i == k - 1 ? list[i] : kth;
  return kth;
}

}  // namespace mimo::cuda
