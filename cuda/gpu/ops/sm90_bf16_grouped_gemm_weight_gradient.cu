// The gradient of expert matrices on Hopper: dw_g (+)= dy_gᵀ x_g, both operands read with their rows along k and the sum over
// a group's rows cut at its end by the copy engine. The engine also adds the results in memory. That is no sum whose order
// is left open: every element of dw gets one addition from the one block that has its result.
#include "grouped_gemm.h"
#include "sm90_grouped.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

/// Box that a warp adds at once: 32 columns of its 16 rows. The sums already in memory are brought into the L2 cache a
/// few boxes before.
constexpr int box_rows = 16, box_columns = 32, boxes_ahead = 4;
constexpr int boxes_in_row = tile_columns / box_columns, boxes = 2 * boxes_in_row;

/// Added to dw, or written over it.
template <bool accumulate>
struct WeightGradient {
  static constexpr bool left_rows = true, right_rows = true, halves = true;
  static constexpr int staging_bytes = box_rows * box_columns * 4;
  CUtensorMap dy, x, dw;
  const int32_t* offsets;
  int32_t n, k;

  __device__ __forceinline__ int count(int group) const { return offsets[group + 1] - offsets[group]; }
  __device__ __forceinline__ int units(int group) const {
    return accumulate && count(group) == 0 ? 0 : (n + tile_rows - 1) / tile_rows;
  }
  /// A group without rows that is written has one step, for which the copy engine reads zeros.
  __device__ __forceinline__ int steps(int group) const { return max(1, (count(group) + depth - 1) / depth); }
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
  }

  __device__ __forceinline__ void store(const Tile& tile, const Sums& sums, char* staging) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, live = rows(tile);
    const auto row_of = [&](int box) {
      return tile.row * tile_rows + box / boxes_in_row * (tile_rows / 2) + warp * box_rows;
    };
    const auto column_of = [&](int box) { return tile.column * tile_columns + box % boxes_in_row * box_columns; };
    const auto prefetch = [&](int box) {
      if (accumulate && lane == 0 && box < boxes) prefetch_box(dw, column_of(box), row_of(box), tile.group);
    };
#pragma unroll
    for (int box = 0; box < boxes_ahead; ++box) prefetch(box);
#pragma unroll
    for (int box = 0; box < boxes; ++box) {
      if (box / boxes_in_row * (tile_rows / 2) >= live || column_of(box) >= k) continue;
      if (lane == 0) wait_boxes_read();
      __syncwarp();
      stage_box(staging, sums[box / boxes_in_row] + box % boxes_in_row * (box_columns / 2));
      publish_stores();
      __syncwarp();
      prefetch(box + boxes_ahead);
      if (lane != 0) continue;
      if constexpr (accumulate) {
        add_box(staging, dw, column_of(box), row_of(box), tile.group);
      } else {
        write_box(staging, dw, column_of(box), row_of(box), tile.group);
      }
    }
  }

  /// Puts 16 sums of every thread where the copy engine reads them, swizzled. Of 8 columns, a row has 32 bytes in the warp.
  /// Odd rows take another pair of eights than even ones, so that all the banks of shared memory have work.
  static __device__ __forceinline__ void stage_box(char* staging, const float* sums) {
    const int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    const bool odd = row & 1;
    char* const own = staging + row * tile_row_bytes + quarter % 2 * 8;
#pragma unroll
    for (int i = 0; i < box_columns / 8; ++i) {
      const float *const even_sum = sums + i * 4, *const odd_sum = sums + (i ^ 2) * 4;
      const int chunk = 2 * (odd ? i ^ 2 : i) + quarter / 2;
      char* const to = own + ((chunk ^ row) << 4);
      *reinterpret_cast<float2*>(to) = make_float2(odd ? odd_sum[0] : even_sum[0], odd ? odd_sum[1] : even_sum[1]);
      *reinterpret_cast<float2*>(to + 8 * tile_row_bytes) =
          make_float2(odd ? odd_sum[2] : even_sum[2], odd ? odd_sum[3] : even_sum[3]);
    }
  }

  /// Shared memory must last until it has been read.
  __device__ __forceinline__ void finish() const { wait_boxes_read(); }
};

template <bool accumulate>
__global__ void MIMO_BLOCK_PAIRS __launch_bounds__(threads, 1)
    kernel(const __grid_constant__ WeightGradient<accumulate> problem, int groups, int columns) {
#ifdef MIMO_ON_SM90A
  multiply_groups(problem, groups, columns);
#endif
}

template <bool accumulate>
void run(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  using Problem = WeightGradient<accumulate>;
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  const Problem problem{ragged_map(args.dy, args.n, depth),
                        ragged_map(args.x, args.k, depth),
                        sums_map(args.dw, args.groups, args.n, args.k, box_rows),
                        args.offsets,
                        narrow(args.n),
                        narrow(args.k)};
  launch(stream, kernel<accumulate>, grid_of(stream.device->multiprocessors / pair * pair), dim3(threads),
         shared_bytes<Problem>(args.groups), problem, narrow(args.groups), narrow(ceil_div(args.k, tile_columns)));
}

}  // namespace

void sm90_bf16_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  if (args.n == 0 || args.k == 0) return;
  args.accumulate != 0 ? run<true>(stream, args) : run<false>(stream, args);
}

}  // namespace mimo::cuda
