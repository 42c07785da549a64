// Shared by the gated delta rule's kernels that use mma.sync (gated_delta.h), on GPUs other than Hopper; tiles and products of
// sm80_ssd.cuh.
#pragma once
#include "gated_delta.h"
#include "packed.cuh"
#include "sm80_ssd.cuh"

namespace mimo::cuda {

static_assert(ssd_chunk == delta_chunk);

/// Starts the copies of bytes to shared memory, both aligned to 16.
__device__ __forceinline__ void fetch_bytes(const void* from, int bytes, void* to) {
  for (int at = threadIdx.x * 16; at < bytes; at += ssd_block * 16) {
    copy_async(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, true);
  }
}

/// Writes the first `count` rows of a 64-column tile, 16 bytes at a time.
__device__ __forceinline__ void store_rows(const char* tile, int count, bf16* to, int64_t stride) {
  for (int index = threadIdx.x; index < count * 8; index += ssd_block) {
    const int row = index / 8, chunk = index % 8;
    *reinterpret_cast<uint4*>(to + row * stride + chunk * 8) = *reinterpret_cast<const uint4*>(tile + tile_offset(row, chunk));
  }
}

/// A value of this thread's two rows of a 64-row result.
struct RowPair {
  float value[2];

  __device__ explicit RowPair(const float* of_rows) {
    const int row = own_row() + threadIdx.x % 32 / 4;
    value[0] = of_rows[row], value[1] = of_rows[row + 8];
  }
  __device__ float operator[](int half) const { return value[half]; }
};

/// The decay of a whole chunk.
__device__ __forceinline__ float decay_of(const DeltaSteps& tokens) {
  return exp_for(static_cast<const bf16*>(nullptr), tokens.sum[delta_chunk - 1]);
}

/// The states at the starts of chunks [pieces, H_v, 128, 128] and what chunks write, [T, H_v 128].
struct DeltaStates {
  bf16 *states, *written;
};

/// The pass over the states of every sequence: what the backward direction reads, or if `keep` is null the output, and the final states
/// unless null.
void sm80_bf16_gated_delta_pass(mimo_stream& stream, const DeltaInputs& in, const DeltaChunks& chunks, bf16* o, float* final_state,
                                const DeltaStates* keep);

}  // namespace mimo::cuda
