// From sums by columns to the gradients of masks (docs/spec/elastic.md §9).
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

/// Blocks that sum rows by columns: 32 packs of columns by 8 lanes of rows, which share so many rows.
constexpr int mask_row_lanes = 8;
constexpr int64_t mask_rows_per_block = 128;

/// Writes a block's sums, added in the order of its lanes, to partial[blockIdx.y].
template <int Width>
__device__ __forceinline__ void write_column_sums(const float (&sum)[Width], int64_t width, float* partial) {
  __shared__ float shared[mask_row_lanes][32 * Width + 1];
#pragma unroll
  for (int i = 0; i < Width; ++i) shared[threadIdx.y][threadIdx.x * Width + i] = sum[i];
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32 * Width;
  for (int c = threadIdx.y * 32 + threadIdx.x; c < 32 * Width; c += 32 * mask_row_lanes) {
    if (first + c >= width) break;
    float total = 0;
#pragma unroll
    for (int lane = 0; lane < mask_row_lanes; ++lane) total += shared[lane][c];
    partial[blockIdx.y * width + first + c] = total;
  }
}

/// Sums of rows by columns: partial[p][c] of the rows from p * rows_per_partial on. Those of rows that are not live are not read.
struct PartialSums {
  const float* partial;
  int64_t rows, rows_per_partial, width;
  const int32_t* row_count;  // or null
};

/// With S_c = Σ_p partial[p][c], in a fixed order: dfactors[c] += scale S_c, dscale[c] += factors[c] S_c. Null factors and a
/// null scale are 1; a null gradient is left out.
void add_mask_gradients(mimo_stream& stream, const PartialSums& sums, const float* factors, const float* scale,
                        float* dfactors, float* dscale);

}  // namespace mimo::cuda
