// Rounds rows to e4m3 in runs of 128 columns, each times a power of two (docs/spec/moe-performance.md §1.7).
#include "e4m3.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256;

/// Sixteen lanes a run, eight columns a lane.
__global__ void rows_kernel(const bf16* x, int64_t rows, int64_t width, int runs, const int32_t* live, uint8_t* values,
                            float* factors) {
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) / 16;
  const int64_t row = number / runs;
  const int index = static_cast<int>(number - row * runs);
  const int64_t column = static_cast<int64_t>(index) * e4m3_run + threadIdx.x % 16 * 8;
  const bool lives = row < *live && column < width;
  float value[8] = {};
  if (lives) read(x + row * width + column, value);
  store_run(value, values + row * width + column, factors + index * rows + row, lives);
}

}  // namespace

void quantize_rows(mimo_stream& stream, const void* x, int64_t rows, int64_t width, const int32_t* live, const E4m3Operand& to) {
  const int64_t runs = ceil_div(width, e4m3_run);
  launch(stream, rows_kernel, grid_of(ceil_div(rows * runs * 16, threads)), dim3(threads), 0, static_cast<const bf16*>(x), rows,
         width, static_cast<int>(runs), live, to.values, to.factors);
}

}  // namespace mimo::cuda
