// Transposes and quantises groups of rows to e4m3, so that products can sum over rows (docs/spec/moe-performance.md
// §1.7). A thread block takes 128 rows x 128 columns; each thread transposes 8 x 8 values in registers, and shared
// memory joins the 128 values of a column into one contiguous store. Rows already in e4m3 have one factor for each row
// and 128 columns; rescaling by powers of two is exact except where a value becomes subnormal. TMA prefetches these
// rows: loads by threads that then wait at barriers leave memory idle.
#include "e4m3.cuh"
#include "early.cuh"
#include "sm90.cuh"
#include "sum_before.cuh"

namespace mimo::cuda {
namespace {

constexpr int side = static_cast<int>(e4m3_run), threads = 256, warps = threads / 32, eights = side / 8;
constexpr int finding_threads = 1024;

/// Launched with one block.
__global__ void __launch_bounds__(finding_threads) find_kernel(const int32_t* offsets, int groups, E4m3RowBlocks to) {
  __shared__ int32_t of_warp[finding_threads / 32];
  previous_is_done();
  let_next_start();
  int before = 0;  // blocks of the groups processed so far
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
  float by[side];  // factor of each column
};

/// Scale factors of a block's columns, from the amax that each thread has seen of its columns.
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
/// Scale factor of a whole 128 x 128 block.
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
  uint4 values = make_uint4(0, 0, 0, 0);
  __device__ __forceinline__ void numbers(float (&to)[8]) const { read(values, to); }
};
struct EightOfE4m3 {
  uint2 values;
  float factor;
  __device__ __forceinline__ void numbers(float (&to)[8]) const {
    read_e4m3(values, to);
#pragma unroll
    for (float& number : to) number *= factor;
  }
};

/// Writes tile `tile` of row block `block` from the 8 x 8 values of each thread; all_have() is called once all threads
/// have read theirs. All threads of the block must call it.
template <bool square, class Eight, class AllHave>
__device__ __forceinline__ void turn_tile(const Eight (&given)[8], int64_t block, int tile, int64_t width, const E4m3Columns& to, AllHave all_have) {
  __shared__ Factors factors;
  __shared__ uint2 turned[side][eights];
  const int across = threadIdx.x % eights, down = threadIdx.x / eights, first_column = tile * side;
  float seen[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float value[8];
    given[i].numbers(value);
#pragma unroll
    for (int j = 0; j < 8; ++j) seen[j] = fmaxf(seen[j], fabsf(value[j]));
  }
  if constexpr (square) {
    find_factor(seen, to.factors + block * ceil_div(width, side) + tile, factors);
  } else {
    find_factors(seen, first_column, width, to.factors + block * width + first_column, factors);
  }
  all_have();
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
  // XOR swizzle against bank conflicts, both for 16 columns and for 16 groups of 8 of one column.
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

/// Transposes and quantises a tile of bf16 rows.
template <bool square>
__global__ void __launch_bounds__(threads, 3) turn_bf16_kernel(const bf16* x, int64_t width, const int2* rows_of_block, E4m3Columns to) {
  previous_is_done();
  let_next_start();
  const int2 rows = rows_of_block[blockIdx.y];
  if (rows.y < 0) return;
  const int tile = static_cast<int>(blockIdx.x), column = tile * side + threadIdx.x % eights * 8;
  EightOfBf16 given[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = threadIdx.x / eights * 8 + i;
    if (row < rows.y && column < width) given[i].values = eight_bf16(x + static_cast<int64_t>(rows.x + row) * width + column);
  }
  turn_tile<square>(given, blockIdx.y, tile, width, to, [] {});
}

constexpr int copied_tiles = 2, copied_blocks = 3;  // tiles in flight in a block; resident blocks an SM
constexpr int tile_bytes = side * side;
/// An e4m3 tile's factors and rows; its bytes lie beside. Copies start at 16-byte multiples, so the first factor is at
/// index 0 .. 3.
struct alignas(16) CopiedTile {
  float factors[side + 4];
  int2 rows;  // rows of its row block; -1 past the last tile
  uint64_t full;
};

/// Transposes and requantises tiles of e4m3 rows; persistent blocks.
template <bool square>
__global__ void __launch_bounds__(threads, copied_blocks)
    turn_e4m3_kernel(const __grid_constant__ CUtensorMap x, const float* row_factors, int64_t factor_stride, int64_t width,
                     const int2* rows_of_block, int tiles, int tiles_across, E4m3Columns to) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  __shared__ CopiedTile copied[copied_tiles];
  char* const bytes = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  if (threadIdx.x == 0) {
    for (CopiedTile& of : copied) sm90::initialise(&of.full, 1);
    sm90::publish_barriers();
  }
  previous_is_done();
  let_next_start();
  const auto copy = [&](int number, int slot) {
    CopiedTile& into = copied[slot];
    into.rows = number < tiles ? rows_of_block[number / tiles_across] : make_int2(0, -1);
    if (into.rows.y < 0) return sm90::arrive(&into.full);
    const int tile = number % tiles_across, first = into.rows.x;
    // Whole fours of factors, and none past those of the rows: there are factor_stride of them.
    const auto factor_bytes = static_cast<uint32_t>(((first & 3) + into.rows.y + 3) / 4 * 4 * sizeof(float));
    sm90::arrive_expecting(&into.full, tile_bytes + factor_bytes);
    sm90::copy_ragged_box(bytes + slot * tile_bytes, x, tile * side, 0, first, first + into.rows.y, &into.full);
    if (factor_bytes == 0) return;
    sm90::copy_bytes(into.factors, row_factors + tile * factor_stride + (first & ~3), factor_bytes, &into.full);
  };
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < copied_tiles; ++slot) copy(static_cast<int>(blockIdx.x + slot * gridDim.x), slot);
  }
  __syncthreads();  // barriers are initialised
  const int across = threadIdx.x % eights, down = threadIdx.x / eights;
  int slot = 0;
  uint32_t parity = 0;
  for (int number = static_cast<int>(blockIdx.x);; number += static_cast<int>(gridDim.x)) {
    const CopiedTile& from = copied[slot];
    sm90::wait(&copied[slot].full, parity);
    const int2 rows = from.rows;
    if (rows.y < 0) return;
    EightOfE4m3 given[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = down * 8 + i;
      const char* const chunk = bytes + slot * tile_bytes + row * side + ((across / 2 ^ i) << 4);
      given[i] = {*reinterpret_cast<const uint2*>(chunk + across % 2 * 8), row < rows.y ? from.factors[(rows.x & 3) + row] : 0.0f};
    }
    turn_tile<square>(given, number / tiles_across, number % tiles_across, width, to, [&] {
      if (threadIdx.x == 0) copy(number + copied_tiles * static_cast<int>(gridDim.x), slot);
    });
    if (++slot == copied_tiles) slot = 0, parity ^= 1;
  }
#endif
}

}  // namespace

void find_row_blocks(mimo_stream& stream, const int32_t* offsets, int64_t groups, const E4m3RowBlocks& to) {
  launch_early(stream, find_kernel, dim3(1), dim3(finding_threads), 0, offsets, static_cast<int>(groups), to);
}

void turn_rows(mimo_stream& stream, const E4m3Source& x, int64_t width, const E4m3RowBlocks& blocks, bool square,
               const E4m3Columns& to) {
  const int64_t across = ceil_div(width, e4m3_run);
  if (x.factors == nullptr) {
    launch_early(stream, square ? turn_bf16_kernel<true> : turn_bf16_kernel<false>, grid_of(across, blocks.blocks), dim3(threads), 0,
                 static_cast<const bf16*>(x.values), width, blocks.rows, to);
    return;
  }
  constexpr int shared_bytes = 1024 + copied_tiles * tile_bytes;
  const auto kernel = square ? turn_e4m3_kernel<true> : turn_e4m3_kernel<false>;
  // Static and dynamic shared memory together exceed the default 48 KiB.
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "asking for shared memory");
  launch_early(stream, kernel, grid_of(stream.device->multiprocessors * copied_blocks), dim3(threads), shared_bytes,
               byte_ragged_map(x.values, width, side), x.factors, x.factor_stride, width, blocks.rows, across * blocks.blocks, across, to);
}

}  // namespace mimo::cuda
