// Exclusive prefix sum over the threads of a block.
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

/// Returns the exclusive prefix sum over a block of `warps` <= 32 warps, and the total. `warp_totals` may be reused
/// after the block's next barrier.
template <int warps>
__device__ __forceinline__ int2 sum_before(int32_t value, int32_t* warp_totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(all_lanes, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  const int32_t total = lane < warps ? warp_totals[lane] : 0;
  const int32_t before = __reduce_add_sync(all_lanes, lane < warp ? total : 0);
  return make_int2(before + inclusive - value, __reduce_add_sync(all_lanes, total));
}

}  // namespace mimo::cuda
