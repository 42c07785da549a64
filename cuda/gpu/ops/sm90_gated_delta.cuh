// Shared by Hopper's kernels of the gated delta rule (gated_delta.h); tiles and products of sm90_ssd.cuh. States are transposed: a tile
// has 64 value columns as rows and 64 key columns. In global memory they are swizzled tiles [piece][head][128 / 64 of the key][128 / 64 of
// the value], which plain bulk copies move.
#pragma once
#include "gated_delta.h"
#include "sm90_ssd.cuh"

namespace mimo::cuda::sm90 {

static_assert(ssd_chunk == delta_chunk);
constexpr int64_t delta_state_elements = delta_head * delta_head;

/// Rows of one of `heads` heads, in boxes of a chunk and 64 columns.
inline CUtensorMap chunk_map(const void* data, int64_t heads, int64_t stride) {
  return heads_map(data, heads, delta_head, delta_head, stride, delta_chunk);
}
/// The same by halves of heads, which write_head_tile takes for heads.
inline CUtensorMap half_chunk_map(const void* data, int64_t heads, int64_t stride) {
  return heads_map(data, 2 * heads, delta_head / 2, delta_head / 2, stride, delta_chunk);
}

/// Bulk copy of a tile to global memory.
__device__ __forceinline__ void write_tile(const char* tile, bf16* to) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(tile)), "n"(ssd_tile_bytes)
               : "memory");
}
__device__ __forceinline__ void commit_writes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until this thread's copies are in global memory.
__device__ __forceinline__ void wait_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// sum[64, 64] (+)= left[64, 16] right[16, 64] with the left operand in registers.
template <bool right_rows>
__device__ __forceinline__ void multiply_left(float (&sum)[32], const uint32_t* left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
#define MIMO_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define MIMO_16(i) MIMO_4(i), MIMO_4(i + 4), MIMO_4(i + 8), MIMO_4(i + 12)
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : MIMO_16(0), MIMO_16(16)
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(static_cast<int>(add)), "n"(right_rows ? 1 : 0));
#undef MIMO_16
#undef MIMO_4
#endif
}
/// Issues sum (+)= left right over k = 64.
template <bool right_rows>
__device__ __forceinline__ void queue_left(float (&sum)[32], const uint32_t (&left)[16], const char* right, bool add) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    multiply_left<right_rows>(sum, left + 4 * k, operand(right, right_rows, ssd_tile_bytes) + k * operand_step<right_rows>, add || k > 0);
  }
}

/// A tile's transpose as packed pairs (mma's left-operand layout): the tile's columns are the rows.
__device__ __forceinline__ void load_transposed(const char* tile, const SsdPlace& own, uint32_t (&packed)[16]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t part[4];
    left_k_rows(part, tile, own.warp * 16, 16 * k);
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[4 * k + i] = part[i];
  }
}
/// Stores packed pairs transposed: their rows become the tile's columns.
__device__ __forceinline__ void store_transposed(char* tile, const SsdPlace& own, const uint32_t (&packed)[16]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const char* const row = tile + tile_offset(16 * k + own.lane / 16 * 8 + own.lane % 8, 2 * own.warp + own.lane / 8 % 2);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(packed[4 * k]), "r"(packed[4 * k + 1]), "r"(packed[4 * k + 2]), "r"(packed[4 * k + 3])
                 : "memory");
  }
}

/// A value of each of this thread's accumulators' columns, read before a product's end is waited for.
struct ColumnFactors {
  float2 pair[8];

  __device__ __forceinline__ ColumnFactors(const float* of_columns, const SsdPlace& own) {
#pragma unroll
    for (int j = 0; j < 8; ++j) pair[j] = pair_at(of_columns, 8 * j + own.column);
  }
  /// That of accumulator i.
  __device__ __forceinline__ float operator[](int i) const { return i % 2 == 0 ? pair[i / 4].x : pair[i / 4].y; }
};
/// Element i of an accumulator from its packed form.
__device__ __forceinline__ float unpacked(const uint32_t (&packed)[16], int i) {
  return i % 2 == 0 ? lower_bf16(packed[i / 2]) : upper_bf16(packed[i / 2]);
}

/// The states at the starts of chunks, what chunks write [T, H_v 128], and the gradients dS' and R.
struct DeltaKept {
  bf16 *states, *written, *dstates, *solved;
};
/// The pass that keeps states and what chunks write, and the reverse pass, which writes dv too.
void sm90_bf16_gated_delta_passes(mimo_stream& stream, const DeltaInputs& in, const DeltaChunks& chunks, const DeltaKept& kept,
                                  const bf16* d_o, bf16* dv, int64_t dv_stride);

}  // namespace mimo::cuda::sm90
