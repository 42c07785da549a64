// Weight gradient of the grouped GEMM on Hopper in e4m3 (docs/spec/moe-performance.md §1.7): dw_g[n, k] (+)= dy_gᵀ x_g.
// e4m3 wgmma needs k-major operands, so dy and x are first transposed and quantised along rows: dy with a factor for
// 128 rows of each column, x for 128 rows x 128 columns.
#include "e4m3.h"
#include "grouped_gemm.h"
#include "sm90_e4m3_grouped.cuh"
#include "sm90_sums.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

/// TMA boxes of a warp's rows of a slice. All fit in shared memory at once because the ring has three stages, not four.
constexpr int boxes = 128 / sums_box_columns;

/// accumulate: dw += result, else dw = result.
template <bool accumulate>
struct E4m3WeightGradient : E4m3Problem<3, boxes * sums_box_bytes> {
  static constexpr bool steps_vary = true;
  /// Boxes to store go out one by one; boxes to add go out together, which leaves time to prefetch their destinations.
  static constexpr int boxes_at_once = accumulate ? boxes : 1;
  CUtensorMap dw;
  const int32_t *offsets, *first_block;
  int32_t height_of_all;  // dw is [groups, height_of_all, n]

  __device__ __forceinline__ int first(int group) const { return first_block[group]; }
  __device__ __forceinline__ int last(int group) const { return first_block[group + 1]; }
  __device__ __forceinline__ int height(int, int) const { return height_of_all; }
  __device__ __forceinline__ int units(int group) const {
    return accumulate && offsets[group] == offsets[group + 1] ? 0 : units_of(height_of_all);
  }
  __device__ __forceinline__ int steps(const E4m3Result& at) const { return at.last - at.first; }
  __device__ __forceinline__ void copy_rows(void* to, const E4m3Result& at, int step, int row, uint64_t* full) const {
    copy_box(to, a, 0, row, at.first + step, full);
  }
  __device__ __forceinline__ void copy_rows_to_pair(void* to, const E4m3Result& at, int step, int row, uint64_t* full) const {
    copy_box_to_pair(to, a, 0, row, at.first + step, full);
  }
  __device__ __forceinline__ int column(int) const { return 0; }
  __device__ __forceinline__ int matrix(const E4m3Result& at, int step) const { return at.first + step; }
  __device__ __forceinline__ const float* factors_of_rows(const E4m3Result& at) const {
    return row_factors + at.first * factor_stride + at.row;
  }
  __device__ __forceinline__ int factors_skipped(const E4m3Result&) const { return 0; }
  __device__ __forceinline__ int factor_of_block(const E4m3Result& at) const { return at.first * run_stride + at.column; }
  __device__ __forceinline__ void store(const E4m3Result& result, int row, const float (&sums)[64], char* staging) const {
    const auto column_of = [&](int box) { return result.column * columns_of_result + box * sums_box_columns; };
    if (row >= height_of_all) return;
    store_sums<accumulate, boxes, boxes, boxes_at_once>(
        dw, result.group, staging, [&](int) { return row; }, column_of,
        [&](int box) { return sums + box * (sums_box_columns / 2); }, [&](int box) { return column_of(box) < n; });
  }
  /// Shared memory must stay valid until TMA has read it.
  __device__ __forceinline__ void finish() const { wait_boxes_read(); }
};

template <bool accumulate>
__global__ void MIMO_BLOCK_PAIRS __launch_bounds__(threads, 1)
    kernel(const __grid_constant__ E4m3WeightGradient<accumulate> problem, int groups) {
#ifdef MIMO_ON_SM90A
  multiply_e4m3_groups(problem, groups);
#endif
}

template <bool accumulate>
void multiply(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args, const E4m3RowBlocks& blocks,
              const E4m3Columns& dy, const E4m3Columns& x) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  using Problem = E4m3WeightGradient<accumulate>;
  Problem problem;
  problem.a = byte_matrices_map(dy.values, blocks.blocks, args.n, e4m3_run, Problem::slice);
  problem.b = byte_matrices_map(x.values, blocks.blocks, args.k, e4m3_run, Problem::slice);
  problem.row_factors = dy.factors, problem.factor_stride = args.n, problem.block_factors = x.factors;
  problem.run_stride = narrow(ceil_div(args.k, e4m3_run)), problem.n = narrow(args.k);
  problem.dw = sums_map(args.dw, args.groups, args.n, args.k, sums_box_rows);
  problem.offsets = args.offsets, problem.first_block = blocks.first;
  problem.height_of_all = narrow(args.n);
  launch_early(stream, kernel<accumulate>, grid_of(stream.device->multiprocessors / pair * pair), dim3(threads),
               e4m3_shared_bytes<Problem>(args.groups), problem, narrow(args.groups));
}

/// Buffers of a transposed operand, aligned for TMA.
struct Turned {
  Turned(mimo_stream& stream, int64_t blocks, int64_t width, int64_t factors, int64_t spare)
      : memory(&stream, blocks * width * e4m3_run + blocks * factors * 4 + spare),
        columns{memory.as<uint8_t>(), reinterpret_cast<float*>(memory.as<uint8_t>() + blocks * width * e4m3_run)} {}
  Workspace memory;
  E4m3Columns columns;
};

}  // namespace

bool sm90_e4m3_grouped_gemm_weight_gradient_fits(const mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  const auto readable = [](const void* pointer, int32_t dtype, int64_t width) {
    return (dtype == MIMO_DTYPE_BF16 || dtype == MIMO_DTYPE_U8) && packs_fit<bf16>(pointer, width, width, 16);
  };
  return readable(args.dy, args.dy_dtype, args.n) && readable(args.x, args.x_dtype, args.k) && packs_fit<float>(args.dw, 4, 4, 4) &&
         e4m3_row_blocks(args.rows, args.groups) <= 65535 && sm90_grouped_gemm_fits(stream, args.rows, args.groups, args.n, args.k);
}

void sm90_e4m3_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  const int64_t count = e4m3_row_blocks(args.rows, args.groups);
  const Workspace places(&stream, count * static_cast<int64_t>(sizeof(int2)) + (args.groups + 1) * 4);
  const E4m3RowBlocks blocks{reinterpret_cast<int32_t*>(places.as<int2>() + count), places.as<int2>(), count};
  const Turned dy(stream, count, args.n, args.n, E4m3WeightGradient<true>::row_factor_bytes);
  const Turned x(stream, count, args.k, ceil_div(args.k, e4m3_run), E4m3WeightGradient<true>::block_factor_bytes);
  find_row_blocks(stream, args.offsets, args.groups, blocks);
  const int64_t factor_stride = e4m3_factor_stride(args.rows);
  turn_rows(stream, {args.dy, args.dy_factors, factor_stride}, args.n, blocks, false, dy.columns);
  turn_rows(stream, {args.x, args.x_factors, factor_stride}, args.k, blocks, true, x.columns);
  args.accumulate != 0 ? multiply<true>(stream, args, blocks, dy.columns, x.columns)
                       : multiply<false>(stream, args, blocks, dy.columns, x.columns);
}

}  // namespace mimo::cuda
