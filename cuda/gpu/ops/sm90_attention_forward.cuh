// Shared by Hopper's attention forward kernels: online softmax of a tile's scores with a running maximum and sum (Dao
// et al., FlashAttention-2).
#pragma once
#include "kernel.cuh"
#include "sm90_attention.cuh"

namespace mimo::cuda::sm90 {

/// The accumulators are rescaled only when the maximum has grown by more than this power of 2, which is rare.
constexpr float slack = 8;

/// Maximum over the four threads that share a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(all_lanes, x, 1);
  return x + __shfl_xor_sync(all_lanes, x, 2);
}

/// 0 or 1: whether value j of a thread's [64, columns] accumulators is in its upper or lower row.
__device__ constexpr int row_of(int j) { return j / 2 % 2; }

/// Masks the scores of keys from `live` on: their weights become 0.
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

/// Online softmax of a thread's two rows: weights 2^(scale s - maximum), and their sum over this thread's columns.
/// `maximum` is the row's largest scaled score, or up to `slack` less.
struct Softmax {
  float scale;  // softmax scale times log2 e
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  float factor[2];  // factor for the sums and outputs so far
  bool changes;     // whether a factor of the warp is not 1

  /// Computes the weights of a tile and updates maximum, sum and factor. `weight` may alias `s`.
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
  /// Rescales the output accumulators to the new maximum.
  __device__ __forceinline__ void rescale(float (&o)[head_sums]) const {
    if (!changes) return;
#pragma unroll
    for (int j = 0; j < head_sums; ++j) o[j] *= factor[row_of(j)];
  }
};

}  // namespace mimo::cuda::sm90
