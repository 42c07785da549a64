// The gradient of expert matrices on Hopper: dw_g += dy_gᵀ x_g, both operands read with their rows along k and the sum over
// a group's rows cut at its end by the copy engine.
#include "grouped_gemm.h"
#include "sm90_grouped.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

struct WeightGradient {
  static constexpr bool left_rows = true, right_rows = true, halves = false;
  CUtensorMap dy, x, dw_boxes;
  float* dw;
  const int32_t* offsets;
  int32_t n, k;

  __device__ __forceinline__ int count(int group) const { return offsets[group + 1] - offsets[group]; }
  __device__ __forceinline__ int units(int group) const { return count(group) > 0 ? (n + tile_rows - 1) / tile_rows : 0; }
  __device__ __forceinline__ int steps(int group) const { return (count(group) + depth - 1) / depth; }
  __device__ __forceinline__ int rows(const Tile& tile) const { return min(tile_rows, n - tile.row * tile_rows); }
  __device__ __forceinline__ void fetch(const Tile& tile, int step, int rank, char* left, char* right,
                                        uint64_t* barrier) const {
    const int first = offsets[tile.group], last = offsets[tile.group + 1], row = step * depth;
    copy_ragged_box_to_pair(left + rank * column_tile_bytes, dy, tile.row * tile_rows + rank * 64, row, first, last,
                            barrier);
#pragma unroll
    for (int j = 0; j < tile_columns / 64; ++j) {
      copy_ragged_box(right + j * column_tile_bytes, x, tile.column * tile_columns + j * 64, row, first, last,
                      barrier);
    }
    // What the result is added to is in the L2 cache when the last product is done.
    if (row + depth >= last - first) {
      prefetch_box(dw_boxes, tile.column * tile_columns, tile.row * tile_rows, tile.group);
    }
  }

  /// Of 16 columns, lanes 0, 2, 1, 3 of a quad take 4 each, after swapping two values of every eight with the lane beside.
  __device__ __forceinline__ void store(const Tile& tile, const Sums& sums) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool odd = lane & 1;
    const int first = warp * 16 + lane / 4, live = rows(tile) - first;
    const int column = tile.column * tile_columns + (odd ? 8 : 0) + (lane & 2) * 2, width = k - column;
    float* to = dw + (static_cast<int64_t>(tile.group) * n + tile.row * tile_rows + first) * k + column;
    constexpr int at_once = 4;  // registers are few before the first results are gone
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // half of the rows, row or row + 8
      const bool in = part / 2 * 64 + part % 2 * 8 < live;
#pragma unroll
      for (int j = 0; j < tile_columns / 16; j += at_once) {
        const float* const sum = sums[part / 2] + j * 8 + part % 2 * 2;
        add_batch<at_once>(to + j * 16, in ? width - j * 16 : 0, sum, odd);
      }
      to += static_cast<int64_t>(part == 1 ? 56 : 8) * k;
    }
  }

  template <int Count>
  static __device__ __forceinline__ void add_batch(float* to, int width, const float* pairs, bool odd) {
    float4 before[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (i * 16 < width) before[i] = *reinterpret_cast<const float4*>(to + i * 16);
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float* const pair = pairs + i * 8;
      const float got0 = __shfl_xor_sync(all_lanes, odd ? pair[0] : pair[4], 1);
      const float got1 = __shfl_xor_sync(all_lanes, odd ? pair[1] : pair[5], 1);
      const float4 sum = odd ? make_float4(got0, got1, pair[4], pair[5]) : make_float4(pair[0], pair[1], got0, got1);
      if (i * 16 < width) {
        *reinterpret_cast<float4*>(to + i * 16) =
            make_float4(before[i].x + sum.x, before[i].y + sum.y, before[i].z + sum.z, before[i].w + sum.w);
      }
    }
  }
};

__global__ void MIMO_BLOCK_PAIRS __launch_bounds__(threads, 1)
    kernel(const __grid_constant__ WeightGradient problem, int groups, int columns) {
#ifdef MIMO_ON_SM90A
  multiply_groups(problem, groups, columns);
#endif
}

}  // namespace

void sm90_bf16_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  if (args.rows == 0 || args.n == 0 || args.k == 0) return;
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  const WeightGradient problem{ragged_map(args.dy, args.n, depth),
                               ragged_map(args.x, args.k, depth),
                               sums_map(args.dw, args.groups, args.n, args.k, tile_rows, tile_columns),
                               args.dw,
                               args.offsets,
                               narrow(args.n),
                               narrow(args.k)};
  launch(stream, kernel, grid_of(stream.device->multiprocessors / pair * pair), dim3(threads), shared_bytes(args.groups), problem,
         narrow(args.groups), narrow(ceil_div(args.k, tile_columns)));
}

}  // namespace mimo::cuda
