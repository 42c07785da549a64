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
  template <int N>
  __device__ __forceinline__ void rescale(float (&o)[N]) const {
    if (!changes) return;
#pragma unroll
    for (int j = 0; j < N; ++j) o[j] *= factor[row_of(j)];
  }
};

/// A work item: queries row .. row + count - 1 of a head of the sequence with tokens first .. last - 1.
struct Work {
  int head, first, last, row, count;  // count 0: no more work
};

/// Maps item numbers, which must rise, to work items of `query_rows` queries; executed by a whole warp. Items of a
/// sequence's later queries come first where `backwards`: under a causal mask they take longest.
template <int query_rows, bool backwards>
struct Walk {
  const int32_t* cu_seqlens;
  int sequences, base = 0, before = 0;  // before: items of the sequences below `base`

  __device__ __forceinline__ Work find(int number, int heads) {
    const int lane = threadIdx.x % 32, piece = number / heads;
    for (; base < sequences; base += 32) {
      const bool exists = base + lane < sequences;
      const int sequence = backwards ? sequences - 1 - base - lane : base + lane;
      const int first = exists ? cu_seqlens[sequence] : 0;
      const int last = exists ? cu_seqlens[sequence + 1] : 0;
      const int pieces = (last - first + query_rows - 1) / query_rows;
      int through = pieces;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(all_lanes, through, offset);
        if (lane >= offset) through += other;
      }
      through += before;
      const unsigned here = __ballot_sync(all_lanes, piece < through);
      if (here != 0) {
        const int owner = __ffs(static_cast<int>(here)) - 1;
        Work work;
        work.head = number % heads;
        work.first = __shfl_sync(all_lanes, first, owner), work.last = __shfl_sync(all_lanes, last, owner);
        const int end = __shfl_sync(all_lanes, through, owner), begin = end - __shfl_sync(all_lanes, pieces, owner);
        work.row = (backwards ? end - 1 - piece : piece - begin) * query_rows;
        work.count = min(query_rows, work.last - work.first - work.row);
        return work;
      }
      before = __shfl_sync(all_lanes, through, 31);
    }
    return {0, 0, 0, 0, 0};
  }
};

}  // namespace mimo::cuda::sm90
