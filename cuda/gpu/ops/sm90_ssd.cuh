// Shared by Hopper's chunk-scan (SSD) kernels: heads of 64 or 72 to 128, chunks of 64 tokens, state dimension 64 or 128,
// bf16.
//
// A tile is 64 x 64 bf16 in the 128-byte swizzle of TMA and wgmma (sm90.cuh); wider matrices are several tiles side by
// side. Of a head wider than 64 the first 64 columns are one part and the rest, the tail, another; kernels take `Tail`
// columns of it: 16, or 64 for heads wider than 80 (0: heads of 64). TMA zero-fills columns past the head's and skips
// them when it stores.
//
// States are stored in global memory as swizzled tiles too, [piece][head], of each part [state_dim / 64][64 or Tail of
// the head][64 of the state], so that a plain bulk copy loads them.
#pragma once
#include "kernel.cuh"
#include "sm90.cuh"
#include "ssd.cuh"

namespace mimo::cuda::sm90 {

constexpr int ssd_chunk = 64, ssd_head = 64;
constexpr int ssd_tile_bytes = ssd_chunk * tile_row_bytes;
constexpr int ssd_tile_elements = ssd_tile_bytes / 2;

template <int Tail>
constexpr int ssd_parts = Tail == 0 ? 1 : 2;
/// Elements of a head's states for each 64 of the state dimension.
template <int Tail>
constexpr int ssd_state_elements = (ssd_head + Tail) * 64;

/// Calls body with the Tail of a head dimension, as std::integral_constant<int, Tail>.
template <class Body>
void with_tail(int64_t head_dim, Body&& body) {
  if (head_dim == ssd_head) {
    body(std::integral_constant<int, 0>{});
  } else if (head_dim <= ssd_head + 16) {
    body(std::integral_constant<int, 16>{});
  } else {
    body(std::integral_constant<int, 64>{});
  }
}
/// Calls body with the state dimension and the Tail.
template <class Body>
void with_sizes(int64_t state_dim, int64_t head_dim, Body&& body) {
  with_tail(head_dim, [&](auto tail) {
    if (state_dim == 64) {
      body(std::integral_constant<int, 64>{}, tail);
    } else {
      body(std::integral_constant<int, 128>{}, tail);
    }
  });
}

/// Decays of a head in a chunk; tokens past the chunk's end have Δ = 0 and the cs of the last token.
struct SsdChunkTokens {
  float sum[ssd_chunk];         // cs log2 e
  float step[ssd_chunk];        // Δ
  float to_end[ssd_chunk];      // exp(cs_Q - cs)
  float weight[ssd_chunk];      // exp(cs_Q - cs) Δ
  float from_start[ssd_chunk];  // exp(cs); the last is the decay of the whole chunk
};

/// A direction of the state recurrence. Forward: a = x, b = B, states[c] = H_c. Reverse: a = dy, b = C, states[c] =
/// dS_c.
struct SsdCarry {
  CUtensorMap a, b;  // heads_map descriptors of the inputs
  bf16* states;
  float* last;  // [sequences, heads, head_dim, state_dim] states after the last chunk, or null
  bool reverse;
};
struct SsdSizes {
  const int32_t* cu_seqlens;
  int64_t sequences, tokens, heads, head_dim, groups, state_dim;
};

/// Computes tokens [pieces][heads] from dt.
template <class Args>
void sm90_bf16_ssd_tokens(mimo_stream& stream, const Args& args, SsdChunkTokens* tokens);

/// Computes the states of one direction, or of two directions in one launch.
void sm90_bf16_ssd_states(mimo_stream& stream, const SsdSizes& sizes, const SsdChunkTokens* tokens, const SsdCarry* carries,
                          int directions);

// ---- wgmma of 64 x 64 and 64 x 16 tiles ------------------------------------------------------------------------

#define MIMO_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define MIMO_16(i) MIMO_4(i), MIMO_4(i + 4), MIMO_4(i + 8), MIMO_4(i + 12)
#define MIMO_SUMS_32                                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}"

/// sum[64, 64] (+)= left[64, 16] right[16, 64]; accumulator layout of multiply_64x192.
template <bool left_rows, bool right_rows>
__device__ __forceinline__ void multiply_tile(float (&sum)[32], uint64_t left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MIMO_SUMS_32 ", %32, %33, p, 1, 1, %35, %36;\n}"
               : MIMO_16(0), MIMO_16(16)
               : "l"(left), "l"(right), "r"(static_cast<int>(add)), "n"(left_rows ? 1 : 0), "n"(right_rows ? 1 : 0));
#endif
}
/// The same with the left operand in registers (mma's layout) and a k-rows right tile.
__device__ __forceinline__ void multiply_tile(float (&sum)[32], const uint32_t* left, uint64_t right) {
#ifdef MIMO_ON_SM90A
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MIMO_SUMS_32
               ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
               : MIMO_16(0), MIMO_16(16)
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
#endif
}
/// sum[64, 16] (+)= left[64, 16] right[16, 16].
template <bool left_rows, bool right_rows>
__device__ __forceinline__ void multiply_tile(float (&sum)[8], uint64_t left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, %12;\n}"
               : MIMO_4(0), MIMO_4(4)
               : "l"(left), "l"(right), "r"(static_cast<int>(add)), "n"(left_rows ? 1 : 0), "n"(right_rows ? 1 : 0));
#endif
}
__device__ __forceinline__ void multiply_tile(float (&sum)[8], const uint32_t* left, uint64_t right) {
#ifdef MIMO_ON_SM90A
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}"
               ", {%8, %9, %10, %11}, %12, 1, 1, 1, 1;\n"
               : MIMO_4(0), MIMO_4(4)
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
#endif
}
#undef MIMO_SUMS_32
#undef MIMO_16
#undef MIMO_4

/// Issues sum (+)= left right over k = 16 Steps; a k-rows operand (left_rows, right_rows) allows k <= 64. Tiles of k-major
/// operands have `Rows` rows on the left, and on the right as many as sum has columns.
template <int Steps, bool left_rows, bool right_rows, int Rows = 64, int Sums>
__device__ __forceinline__ void queue_product(float (&sum)[Sums], const char* left, const char* right, bool add) {
  static_assert(!(left_rows || right_rows) || Steps <= 4);
#pragma unroll
  for (int k = 0; k < Steps; ++k) {
    const uint64_t left_tile = k / 4 * (Rows * tile_row_bytes >> 4), right_tile = k / 4 * (2 * Sums * tile_row_bytes >> 4);
    multiply_tile<left_rows, right_rows>(sum, operand(left, left_rows, ssd_tile_bytes) + left_tile + k % 4 * operand_step<left_rows>,
                                         operand(right, right_rows, ssd_tile_bytes) + right_tile + k % 4 * operand_step<right_rows>,
                                         add || k > 0);
  }
}
/// Issues sum += left right over k = 64.
template <int Sums>
__device__ __forceinline__ void queue_product(float (&sum)[Sums], const uint32_t (&left)[16], const char* right) {
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_tile(sum, left + 4 * k, operand(right, true, ssd_tile_bytes) + k * operand_step<true>);
}

// ---- elements of a tile ----------------------------------------------------------------------------------------

/// Position of a thread's accumulators: rows `row` and row + 8, columns 8 j + `column` and the next.
struct SsdPlace {
  int warp, lane, row, column;
};
__device__ __forceinline__ SsdPlace own_place() {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  return {warp, lane, warp * 16 + lane / 4, lane % 4 * 2};
}
/// The packed pair at columns 8 j + column and the next, row + 8 half.
__device__ __forceinline__ uint32_t& pair_of(char* tile, const SsdPlace& own, int j, int half) {
  return *reinterpret_cast<uint32_t*>(tile + tile_element(own.row + 8 * half, 8 * j + own.column));
}
__device__ __forceinline__ uint32_t pair_of(const char* tile, const SsdPlace& own, int j, int half) {
  return *reinterpret_cast<const uint32_t*>(tile + tile_element(own.row + 8 * half, 8 * j + own.column));
}
__device__ __forceinline__ float2 pair_at(const float* from, int column) {
  return *reinterpret_cast<const float2*>(from + column);
}
/// Sum over the four lanes that share rows.
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(all_lanes, value, 1);
  return value + __shfl_xor_sync(all_lanes, value, 2);
}

/// Stores packed pairs of a product (mma's left-operand layout) as a bf16 tile.
__device__ __forceinline__ void store_tile(char* tile, const SsdPlace& own, const uint32_t (&packed)[16]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    store_matrices(tile + tile_offset(own.warp * 16 + own.lane % 16, 2 * k + own.lane / 16), packed + 4 * k);
  }
}
template <int Sums>
__device__ __forceinline__ void pack_tile(const float (&sum)[Sums], uint32_t (&packed)[Sums / 2]) {
#pragma unroll
  for (int j = 0; j < Sums / 2; ++j) packed[j] = pack_bf16(sum[2 * j], sum[2 * j + 1]);
}
/// Copies the first `count` rows of a tile to global memory, of `Columns` columns those below `live`; executed by a
/// warpgroup.
template <int Columns>
__device__ __forceinline__ void copy_rows(const char* tile, int count, int live, bf16* to, int64_t stride) {
  constexpr int chunks = Columns / 8;
#pragma unroll
  for (int i = 0; i < chunks / 2; ++i) {
    const int index = i * 128 + threadIdx.x % 128, row = index / chunks, chunk = index % chunks;
    if (row < count && 8 * chunk < live) {
      *reinterpret_cast<uint4*>(to + row * stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + tile_offset(row, chunk));
    }
  }
}
/// TMA store of rows from `row` and columns from `column` on of a head of tokens first .. last - 1 to a heads_map; what lies
/// past the last token or the head's columns is skipped.
__device__ __forceinline__ void write_head_tile(const char* tile, const CUtensorMap& map, int head, int row, int first, int last,
                                                int column = 0) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(column), "r"(head), "r"(ragged_end - (last - first) + row), "r"(last), "r"(ragged_end), "r"(shared_address(tile))
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until TMA has read the sources of all but the last `Pending` store groups of this thread.
template <int Pending>
__device__ __forceinline__ void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
/// Named barrier of `Threads` threads in whole warps.
template <int Number, int Threads>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(Number), "n"(Threads) : "memory");
}
/// Arrives once for the warp, after all its lanes have read what the barrier guards.
__device__ __forceinline__ void arrive_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

}  // namespace mimo::cuda::sm90
