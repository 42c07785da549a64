// The gradient of expert matrices on Hopper: dw_g += dy_gᵀ x_g, both operands read with their rows along k and the sum over
// a group's rows cut at its end by the copy engine.
#include "grouped_gemm.h"
#include "sm90_grouped.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

/// What a result is added to comes into shared memory a few pieces of 16 bytes a thread at a time, the first while the
/// products are made. Each thread reads what it copied itself, so that no barrier is needed.
constexpr int batch = 2, ring_batches = 6, batches = 4 * (tile_columns / 16) / batch;

struct WeightGradient {
  static constexpr bool left_rows = true, right_rows = true, halves = false;
  static constexpr int stages = 4, own_bytes = ring_batches * batch * 16 * 256;
  CUtensorMap dy, x;
  float* dw;
  const int32_t* offsets;
  int32_t n, k;

  __device__ __forceinline__ int count(int group) const { return offsets[group + 1] - offsets[group]; }
  __device__ __forceinline__ int units(int group) const { return count(group) > 0 ? (n + tile_rows - 1) / tile_rows : 0; }
  __device__ __forceinline__ int steps(int group) const { return (count(group) + depth - 1) / depth; }
  __device__ __forceinline__ int rows(const Tile& tile) const { return min(tile_rows, n - tile.row * tile_rows); }
  __device__ __forceinline__ void fetch(const Tile& tile, int step, char* left, char* right, uint64_t* barrier) const {
    const int first = offsets[tile.group], last = offsets[tile.group + 1], row = step * depth;
#pragma unroll
    for (int i = 0; i < tile_rows / 64; ++i) {
      copy_ragged_box(left + i * column_tile_bytes, dy, tile.row * tile_rows + i * 64, row, first, last,
                      barrier);
    }
#pragma unroll
    for (int j = 0; j < tile_columns / 64; ++j) {
      copy_ragged_box(right + j * column_tile_bytes, x, tile.column * tile_columns + j * 64, row, first, last,
                      barrier);
    }
  }

  /// Where a thread's results go. Of 16 columns, lanes 0, 2, 1, 3 of a quad take 4 each, after swapping two values of every
  /// eight with the lane beside.
  struct Place {
    float* to;
    int live, width;  // rows and columns from there that are inside
  };
  __device__ __forceinline__ Place place(const Tile& tile) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int column = tile.column * tile_columns + (lane & 1) * 8 + (lane & 2) * 2;
    return {dw + (static_cast<int64_t>(tile.group) * n + tile.row * tile_rows + row) * k + column, rows(tile) - row,
            k - column};
  }
  /// A quarter of a thread's results are in each of these rows, 16 columns apart.
  static constexpr int quarter_row(int quarter) { return quarter / 2 * 64 + quarter % 2 * 8; }
  static __device__ __forceinline__ char* piece(char* own, int b, int i) {
    return own + ((b % ring_batches * batch + i) * 256 + static_cast<int>(threadIdx.x) - 128) * 16;
  }

  /// Batch b: pieces (b mod 3) 4 .. of quarter b / 3.
  __device__ __forceinline__ void copy_batch(const Place& at, char* own, int b) const {
    const int row = quarter_row(b / ring_batches);
    const float* const from = at.to + static_cast<int64_t>(row) * k;
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int column = (b % ring_batches * batch + i) * 16;
      const bool in = row < at.live && column < at.width;
      copy_async(piece(own, b, i), in ? from + column : dw, in);
    }
    copy_commit();
  }
  __device__ __forceinline__ void prepare(const Tile& tile, char* own) const {
    const Place at = place(tile);
#pragma unroll
    for (int b = 0; b < ring_batches; ++b) copy_batch(at, own, b);
  }
  __device__ __forceinline__ void store(const Tile& tile, const Sums& sums, char* own) const {
    const Place at = place(tile);
    const bool odd = threadIdx.x & 1;
#pragma unroll
    for (int b = 0; b < batches; ++b) {
      const int quarter = b / ring_batches, row = quarter_row(quarter);
      float* const to = at.to + static_cast<int64_t>(row) * k;
      copy_wait<ring_batches - 1>();
      float4 result[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const float* const pair = sums[quarter / 2] + (b % ring_batches * batch + i) * 8 + quarter % 2 * 2;
        const float got0 = __shfl_xor_sync(all_lanes, odd ? pair[0] : pair[4], 1);
        const float got1 = __shfl_xor_sync(all_lanes, odd ? pair[1] : pair[5], 1);
        result[i] = *reinterpret_cast<const float4*>(piece(own, b, i));
        result[i].x += odd ? got0 : pair[0], result[i].y += odd ? got1 : pair[1];
        result[i].z += odd ? pair[4] : got0, result[i].w += odd ? pair[5] : got1;
      }
      if (b + ring_batches < batches) {
        copy_batch(at, own, b + ring_batches);
      } else {
        copy_commit();  // an empty group keeps the count of those under way
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int column = (b % ring_batches * batch + i) * 16;
        if (row < at.live && column < at.width) __stcs(reinterpret_cast<float4*>(to + column), result[i]);
      }
    }
  }
};

__global__ void __launch_bounds__(threads, 1)
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
                               args.dw,
                               args.offsets,
                               narrow(args.n),
                               narrow(args.k)};
  launch(stream, kernel, grid_of(stream.device->multiprocessors), dim3(threads), shared_bytes<WeightGradient>(args.groups), problem,
         narrow(args.groups), narrow(ceil_div(args.k, tile_columns)));
}

}  // namespace mimo::cuda
