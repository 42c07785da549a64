// Shared by both sorts of slots by expert (moe_sort.cu, moe_sort_cluster.cu).
#pragma once
#include "early.cuh"
#include "sum_before.cuh"

namespace mimo::cuda {

constexpr int sort_threads = 512, sort_warps = sort_threads / 32;

/// Expert of a slot; -1 if it has none or is not below `end`.
__device__ __forceinline__ int expert_of(const mimo_moe_sort_args& args, int64_t slot, int64_t end) {
  if (slot >= end) return -1;
  const int expert = args.expert_index[slot];
  return expert >= 0 && expert < args.experts ? expert : -1;
}

/// Columns of the thread grid: the power of two that covers `count`; threads beyond share the columns.
__device__ __forceinline__ int columns_of(int count) {
  int columns = 32;
  while (columns < count && columns < sort_threads) columns *= 2;
  return columns;
}

/// rows[warp][e] holds lane masks on entry; on return, the slots of e in lower warps among the warps that one thread
/// sums. sums[sharer][e] = the slots of e in those warps. Thread (column, sharer) handles the experts of its column and
/// warps / sharers warps.
__device__ __forceinline__ void count_lower_warps(int32_t* rows, int32_t* sums, int experts, int column, int columns,
                                                  int sharer, int sharers) {
  const int share_warps = sort_warps / sharers;
  for (int e = column; e < experts; e += columns) {
    int32_t sum = 0;
#pragma unroll 4
    for (int w = sharer * share_warps; w < (sharer + 1) * share_warps; ++w) {
      const int32_t here = __popc(rows[w * experts + e]);
      rows[w * experts + e] = sum;
      sum += here;
    }
    sums[sharer * experts + e] = sum;
  }
}

/// Sorts up to about 100000 slots in one kernel with thread block clusters; returns false where that is not supported.
bool sort_in_clusters(mimo_stream& stream, const mimo_moe_sort_args& args);

}  // namespace mimo::cuda
