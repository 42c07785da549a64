// Weight gradient of the grouped GEMM on Hopper: dw_g[n, k] (+)= dy_gᵀ x_g. Both operands are read with their rows
// along the summed dimension; TMA zero-fills rows past a group's end and stores or reduce-adds the fp32 results.
#include "grouped_gemm.h"
#include "sm90_grouped.cuh"
#include "sm90_sums.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

constexpr int x_box_rows = depth / pair;
constexpr int boxes_in_row = tile_columns / sums_box_columns, boxes = 2 * boxes_in_row;

/// accumulate: dw += result, else dw = result.
template <bool accumulate>
struct WeightGradient {
  static constexpr bool left_rows = true, right_rows = true, halves = true;
  static constexpr int staging_bytes = sums_box_bytes;
  CUtensorMap dy, x, dw;
  const int32_t* offsets;
  int32_t n, k;

  __device__ __forceinline__ int height(int) const { return n; }
  __device__ __forceinline__ int units(int group) const {
    return accumulate && offsets[group] == offsets[group + 1] ? 0 : units_of(n, (k + tile_columns - 1) / tile_columns);
  }
  /// Without accumulation an empty group takes one k-step of zero-filled operands, which writes zeros.
  __device__ __forceinline__ int steps(const Tile& tile) const { return max(1, (tile.last - tile.first + depth - 1) / depth); }
  __device__ __forceinline__ int rows(const Tile& tile) const { return min(tile_rows, n - tile.row * tile_rows); }
  __device__ __forceinline__ void fetch(const Tile& tile, int step, int rank, char* left, char* right,
                                        uint64_t* barrier) const {
    const int first = tile.first, last = tile.last, row = step * depth;
    const int left_column = tile.row * tile_rows, right_column = tile.column * tile_columns;
    if (tile.shares_columns) {
#pragma unroll
      for (int j = 0; j < tile_rows / 64; ++j) {
        copy_ragged_box(left + j * column_tile_bytes, dy, left_column + j * 64, row, first, last, barrier);
      }
      right += rank * (column_tile_bytes / pair);
#pragma unroll
      for (int j = 0; j < tile_columns / 64; ++j) {
        copy_ragged_box_to_pair(right + j * column_tile_bytes, x, right_column + j * 64, row + rank * x_box_rows, first, last, barrier);
      }
    } else {
      copy_ragged_box_to_pair(left + rank * column_tile_bytes, dy, left_column + rank * 64, row, first, last, barrier);
#pragma unroll
      for (int j = 0; j < pair * tile_columns / 64; ++j) {
        copy_ragged_box(right + j * (column_tile_bytes / pair), x, right_column + j / pair * 64, row + j % pair * x_box_rows, first, last,
                        barrier);
      }
    }
  }

  __device__ __forceinline__ void store(const Tile& tile, const Sums& sums, char* staging) const {
    const int warp = threadIdx.x / 32 % 4, live = rows(tile);
    const auto row_of = [&](int box) {
      return tile.row * tile_rows + box / boxes_in_row * (tile_rows / 2) + warp * sums_box_rows;
    };
    const auto column_of = [&](int box) { return tile.column * tile_columns + box % boxes_in_row * sums_box_columns; };
    store_sums<accumulate, boxes, 1, 1>(
        dw, tile.group, staging, row_of, column_of,
        [&](int box) { return sums[box / boxes_in_row] + box % boxes_in_row * (sums_box_columns / 2); },
        [&](int box) { return box / boxes_in_row * (tile_rows / 2) < live && column_of(box) < k; });
  }

  /// Shared memory must stay valid until TMA has read it.
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
                        ragged_map(args.x, args.k, x_box_rows),
                        sums_map(args.dw, args.groups, args.n, args.k, sums_box_rows),
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
