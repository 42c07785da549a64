// Column sums of a matrix [rows, width] in two kernels: each block writes the partial sums of its rows, then a second
// kernel adds the partials in a fixed order.
#pragma once
#include "early.cuh"

namespace mimo::cuda {

/// Rows that a block sums in parallel: its threads are 32 packs of columns x row_lanes rows.
constexpr int row_lanes = 8;

/// Adds the lanes' sums in the order of the lanes and writes the result to partial[blockIdx.y]. All threads of the
/// block must call it.
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

/// Partials that a block adds in parallel: its threads are 32 columns x partial_lanes. A single chain of additions a
/// column would wait for each load.
constexpr int partial_lanes = 16;

/// Returns Σ_p partial[p][column], partial [partials, width], to the threads of lane 0 whose column is below `width`,
/// and 0 to all others. All threads of the block must call it.
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
