// Turns rows of groups and rounds them to e4m3, so that products can sum over rows (docs/spec/moe-performance.md §1.7). A block of
// threads has 128 rows of 128 columns, a thread eight rows of eight columns, which it turns in registers. Shared memory then brings
// the 128 numbers of a column together, so that they are written as one piece. Rows in e4m3 are a run of 128 columns to a block, with
// one factor a row; powers of two change their digits only where a number becomes one of the smallest.
#include "e4m3.cuh"
#include "early.cuh"
#include "sum_before.cuh"

namespace mimo::cuda {
namespace {

constexpr int side = static_cast<int>(e4m3_run), threads = 256, warps = threads / 32, eights = side / 8;
constexpr int finding_threads = 1024;

/// One block of threads.
__global__ void __launch_bounds__(finding_threads) find_kernel(const int32_t* offsets, int groups, E4m3RowBlocks to) {
  __shared__ int32_t of_warp[finding_threads / 32];
  previous_is_done();
  let_next_start();
  int before = 0;  // blocks of the groups that have been found
  for (int start = 0; start < groups; start += finding_threads) {
    const int group = start + static_cast<int>(threadIdx.x);
    const int row = group < groups ? offsets[group] : 0, rows = group < groups ? offsets[group + 1] - row : 0;
    const int own = group < groups ? max(1, (rows + side - 1) / side) : 0;
    const int2 sums = sum_before<finding_threads / 32>(own, of_warp);
    const int first = before + sums.x;
    if (group < groups) to.first[group] = first;
    for (int i = 0; i < own; ++i) to.rows[first + i] = make_int2(row + i * side, min(side, rows - i * side));
    before += sums.y;
    __syncthreads();
  }
  if (threadIdx.x == 0) to.first[groups] = before;
  for (int64_t i = before + threadIdx.x; i < to.blocks; i += finding_threads) to.rows[i] = make_int2(0, -1);
}

struct Factors {
  float by[side];  // factor of a column
};

/// Powers of a block's columns, from the largest magnitudes that the threads have seen of theirs.
__device__ __forceinline__ void find_factors(const float (&seen)[8], int first_column, int64_t width, float* factors, Factors& to) {
  __shared__ float largest[warps][side];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float of_rows[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) of_rows[j] = fmaxf(seen[j], __shfl_xor_sync(all_lanes, seen[j], eights));
  if (lane < eights) write(largest[warp] + lane * 8, of_rows);
  __syncthreads();
  if (threadIdx.x < side) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) most = fmaxf(most, largest[i][threadIdx.x]);
    const int power = power_for(most);
    to.by[threadIdx.x] = factor_for(most, power);
    if (first_column + static_cast<int>(threadIdx.x) < width) factors[threadIdx.x] = most < INFINITY ? power_of_two(-power) : 1.0f;
  }
  __syncthreads();
}
/// The power of a whole block.
__device__ __forceinline__ void find_factor(const float (&seen)[8], float* factor, Factors& to) {
  __shared__ float largest[warps];
  const float of_warp = warp_max(largest_of(seen));
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = of_warp;
  __syncthreads();
  const float most = warp_max(threadIdx.x % 32 < warps ? largest[threadIdx.x % 32] : 0.0f);
  const int power = power_for(most);
  if (threadIdx.x < side) to.by[threadIdx.x] = factor_for(most, power);
  if (threadIdx.x == 0) *factor = most < INFINITY ? power_of_two(-power) : 1.0f;
  __syncthreads();
}

/// Eight columns of a row.
struct EightOfBf16 {
  static constexpr int blocks = 3;  // of threads that registers are for
  uint4 values = make_uint4(0, 0, 0, 0);
  __device__ __forceinline__ void load(const E4m3Source& from, int64_t row, int64_t width, int column) {
    values = eight_bf16(static_cast<const bf16*>(from.values) + row * width + column);
  }
  __device__ __forceinline__ void numbers(float (&to)[8]) const { read(values, to); }
};
struct EightOfE4m3 {
  static constexpr int blocks = 4;
  uint2 values = make_uint2(0, 0);
  float factor = 0;
  __device__ __forceinline__ void load(const E4m3Source& from, int64_t row, int64_t width, int column) {
    values = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(from.values) + row * width + column);
    factor = from.factors[column / run * from.factor_stride + row];
  }
  __device__ __forceinline__ void numbers(float (&to)[8]) const {
    read_e4m3(values, to);
#pragma unroll
    for (float& number : to) number *= factor;
  }
};

template <class Eight, bool square>
__global__ void __launch_bounds__(threads, Eight::blocks) turn_kernel(E4m3Source x, int64_t width, const int2* rows_of_block, E4m3Columns to) {
  __shared__ Factors factors;
  __shared__ uint2 turned[side][eights];
  previous_is_done();
  let_next_start();
  const int2 rows = rows_of_block[blockIdx.y];
  if (rows.y < 0) return;
  const int across = threadIdx.x % eights, down = threadIdx.x / eights, first_column = static_cast<int>(blockIdx.x) * side;
  const int column = first_column + across * 8;
  Eight given[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = down * 8 + i;
    if (row < rows.y && column < width) given[i].load(x, rows.x + row, width, column);
  }
  float seen[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float value[8];
    given[i].numbers(value);
#pragma unroll
    for (int j = 0; j < 8; ++j) seen[j] = fmaxf(seen[j], fabsf(value[j]));
  }
  const int64_t block = blockIdx.y;
  if constexpr (square) {
    find_factor(seen, to.factors + block * gridDim.x + blockIdx.x, factors);
  } else {
    find_factors(seen, first_column, width, to.factors + block * width + first_column, factors);
  }
  float by[8];
  read(factors.by + across * 8, by);
  uint2 byte[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float value[8];
    given[i].numbers(value);
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] *= by[j];
    byte[i] = eight_e4m3(value, 1.0f);
  }
  turn(byte);
  // Eights change places so that neither sixteen columns nor sixteen eights of a column meet in a bank.
#pragma unroll
  for (int i = 0; i < 8; ++i) turned[across * 8 + i][down ^ across] = byte[i];
  __syncthreads();
  uint8_t* const values = to.values + (block * width + first_column) * side;
#pragma unroll
  for (int pass = 0; pass < 8; ++pass) {
    const int local = pass * (threads / eights) + down;
    if (first_column + local < width) *reinterpret_cast<uint2*>(values + local * side + across * 8) = turned[local][across ^ (local / 8)];
  }
}

}  // namespace

void find_row_blocks(mimo_stream& stream, const int32_t* offsets, int64_t groups, const E4m3RowBlocks& to) {
  launch_early(stream, find_kernel, dim3(1), dim3(finding_threads), 0, offsets, static_cast<int>(groups), to);
}

void turn_rows(mimo_stream& stream, const E4m3Source& x, int64_t width, const E4m3RowBlocks& blocks, bool square,
               const E4m3Columns& to) {
  const auto of_bf16 = square ? turn_kernel<EightOfBf16, true> : turn_kernel<EightOfBf16, false>;
  const auto of_e4m3 = square ? turn_kernel<EightOfE4m3, true> : turn_kernel<EightOfE4m3, false>;
  launch_early(stream, x.factors == nullptr ? of_bf16 : of_e4m3, grid_of(ceil_div(width, e4m3_run), blocks.blocks), dim3(threads), 0,
               x, width, blocks.rows, to);
}

}  // namespace mimo::cuda
