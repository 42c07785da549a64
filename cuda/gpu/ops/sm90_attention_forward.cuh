// Shared by the forward attention kernels of Hopper: the weights of a tile's scores, with a running maximum and sum (Dao et al.,
// FlashAttention-2).
#pragma once
#include "kernel.cuh"
#include "sm90_attention.cuh"

namespace mimo::cuda::sm90 {

/// How far, as a power of 2, a row's weights may grow before its sums are scaled down: seldom, then.
constexpr float slack = 8;

/// Over the four threads that share a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(all_lanes, x, 1);
  return x + __shfl_xor_sync(all_lanes, x, 2);
}

/// Whether value j of a thread's values of [64, columns] belongs to the lower of its two rows.
__device__ constexpr int row_of(int j) { return j / 2 % 2; }

/// Gives no weight to the keys of a tile's scores from `live` on.
template <int N>
__device__ __forceinline__ void hide_keys(float (&s)[N], int live) {
  if (live >= 2 * N) return;
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j / 4 * 8 + column + j % 2 >= live) s[j] = -INFINITY;
  }
}

template <int N>
__device__ __forceinline__ void pack_weights(const float (&weight)[N], uint32_t (&packed)[N / 2]) {
#pragma unroll
  for (int j = 0; j < N / 2; ++j) packed[j] = pack_bf16(weight[2 * j], weight[2 * j + 1]);
}

/// The weights of a thread's two rows: 2^(scale s - maximum), and their sum over this thread's columns. `maximum` is the
/// row's largest scaled score, or up to `slack` below it.
struct Softmax {
  float scale;  // of scores, times log2 e
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  float factor[2];  // factor for the sums so far
  bool changes;     // whether one of the warp's factors is not 1

  /// `weight` may be `s`.
  template <int N>
  __device__ __forceinline__ void weigh(const float (&s)[N], float (&weight)[N]) {
    changes = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = s[2 * half];
#pragma unroll
      for (int j = 0; j < N; j += 4) largest = fmaxf(largest, fmaxf(s[j + 2 * half], s[j + 2 * half + 1]));
      largest = row_max(largest) * scale;
      factor[half] = 1;
      if (largest > maximum[half] + slack) {
        factor[half] = exp2_fast(maximum[half] - largest);
        maximum[half] = largest;
        changes = true;
      }
      sum[half] *= factor[half];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      weight[j] = exp2_fast(s[j] * scale - maximum[row_of(j)]);
      sum[row_of(j)] += weight[j];
    }
    changes = __any_sync(all_lanes, changes);
  }
  /// Scales the results so far as their weights now are.
  __device__ __forceinline__ void rescale(float (&o)[head_sums]) const {
    if (!changes) return;
#pragma unroll
    for (int j = 0; j < head_sums; ++j) o[j] *= factor[row_of(j)];
  }
};

}  // namespace mimo::cuda::sm90
