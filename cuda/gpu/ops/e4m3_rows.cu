// Quantises rows to e4m3 in runs of 128 columns with power-of-two factors (docs/spec/moe-performance.md §1.7).
#include "e4m3.cuh"
#include "early.cuh"
#include "operations.h"

namespace mimo::cuda {
namespace {

constexpr int threads = 256, block_rows = 8, lanes = 16;  // lanes of a run: eight columns each
constexpr int at_once = 4;                                 // runs of a lane in flight

/// A block takes eight rows; its groups of 16 lanes take their runs in turn.
__global__ void __launch_bounds__(threads)
    rows_kernel(const bf16* x, int64_t rows, int width, int runs, const int32_t* live, E4m3Operand to) {
  previous_is_done();
  let_next_start();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_rows;
  const int count = static_cast<int>(min(static_cast<int64_t>(block_rows), (live == nullptr ? rows : *live) - first)) * runs;
  const int lane = threadIdx.x % lanes, own = threadIdx.x / lanes;
  for (int base = 0; base < count; base += at_once * (threads / lanes)) {
    uint4 read_value[at_once];
    int row[at_once], index[at_once];
    bool lives[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int number = base + i * (threads / lanes) + own;
      row[i] = number / runs, index[i] = number - row[i] * runs;
      const int column = index[i] * run + lane * 8;
      lives[i] = number < count && column < width;
      read_value[i] = lives[i] ? eight_bf16(x + (first + row[i]) * width + column) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      float value[8];
      read(read_value[i], value);
      store_run(value, to.values + (first + row[i]) * width + index[i] * run + lane * 8,
                to.factors + index[i] * to.factor_stride + first + row[i], lives[i]);
    }
  }
}

}  // namespace

void quantize_rows(mimo_stream& stream, const void* x, int64_t rows, int64_t width, const int32_t* live, const E4m3Operand& to) {
  launch_early(stream, rows_kernel, grid_of(ceil_div(rows, block_rows)), dim3(threads), 0, static_cast<const bf16*>(x),
               rows, static_cast<int>(width), static_cast<int>(ceil_div(width, e4m3_run)), live, to);
}

void e4m3_rows(mimo_stream& stream, const mimo_e4m3_rows_args& args) {
  if (args.rows == 0) return;
  if (args.dtype != MIMO_DTYPE_BF16 || args.width % 16 != 0 || !packs_fit<bf16>(args.x, args.width, args.width, 8) ||
      !packs_fit<uint8_t>(args.values, args.width, args.width, 16)) {
    fail(MIMO_ERROR_UNSUPPORTED, "e4m3_rows on a GPU needs bf16 and a width that is a multiple of 16.");
  }
  quantize_rows(stream, args.x, args.rows, args.width, args.row_count, e4m3_operand(args.values, args.factors, args.rows));
}

}  // namespace mimo::cuda
