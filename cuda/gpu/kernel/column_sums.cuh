// Sums of rows by columns, in two kernels: blocks write partial sums of their rows, then partials are added in a fixed order.
#pragma once
#include "early.cuh"

namespace mimo::cuda {

/// Lanes of rows of a block that sums rows: 32 packs of columns by so many lanes.
constexpr int row_lanes = 8;

/// Writes a block's sums, added in the order of its lanes, to partial[blockIdx.y]. Every thread of the block calls it.
template <int Width>
__device__ __forceinline__ void write_column_sums(const float (&sum)[Width], int64_t width, float* partial) {
  __shared__ float shared[row_lanes][32 * Width + 1];
#pragma unroll
  for (int i = 0; i < Width; ++i) shared[threadIdx.y][threadIdx.x * Width + i] = sum[i];
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32 * Width;
  for (int c = threadIdx.y * 32 + threadIdx.x; c < 32 * Width; c += 32 * row_lanes) {
    if (first + c >= width) break;
    float total = 0;
#pragma unroll
    for (int lane = 0; lane < row_lanes; ++lane) total += shared[lane][c];
    partial[blockIdx.y * width + first + c] = total;
  }
}

/// Lanes of partials of a block that adds them: 32 columns by so many lanes, because a single chain of additions would wait for
/// each load.
constexpr int partial_lanes = 16;

/// Σ partial[p][column] over p, [partials, width]; to the threads of lane 0 whose column is below `width`, else 0. Every thread of
/// the block calls it.
__device__ __forceinline__ float sum_partials(const float* partial, int64_t partials, int64_t width, int64_t column) {
  __shared__ float shared[partial_lanes][33];
  const float own = column < width ? strided_sum(partial + column, partials, width, threadIdx.y, partial_lanes) : 0.0f;
  shared[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return 0;
  float sum = 0;
#pragma unroll
  for (int lane = 0; lane < partial_lanes; ++lane) sum += shared[lane][threadIdx.x];
  return sum;
}

}  // namespace mimo::cuda
