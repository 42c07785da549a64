// Shared by the chunk-scan (SSD) kernels (docs/spec/language-model.md §2.3, §2.4). Sequences are split into chunks
// counted from their first tokens (Piece in kernel.cuh). Chunks are processed in parallel, and a state pass carries the
// states from chunk to chunk; on Hopper the kernel that computes the states carries them too (sm90_ssd.cuh).
//
// Symbols as in the specification: Q tokens in a chunk, cs the inclusive cumulative sum of a = A Δ within a chunk, H_c
// the state before chunk c, S_c the chunk's contribution to it, dS_c the gradient of the state after it.
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

/// Per-token values, [H, T] each.
struct SsdDecays {
  const float* step;  // Δ
  const float* sum;   // cs
};

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

/// Computes Δ and cs of every head; one warp for each chunk and head.
void ssd_decays(mimo_stream& stream, const void* dt, int64_t dt_stride, const float* dt_bias, const float* a_log,
                float dt_minimum, const int32_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t heads,
                int64_t chunk, int32_t dtype, float* step, float* sum);

/// State pass over the chunks of every sequence. Forward: to[c] = H_c from S_c. Reverse: to[c] = dS_c from U_c, the
/// gradient that chunk c contributes to the state before it. Each is [pieces, H, elements]; `to` may alias `from` if
/// fp32. The state after the last chunk goes to last_state [sequences, H, elements] unless that is null.
void ssd_pass(mimo_stream& stream, bool reverse, const float* from, void* to, int32_t to_dtype, float* last_state,
              const float* sum, const int32_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t heads,
              int64_t elements, int64_t chunk);

/// A chunk's and head's contributions to the gradients of D, A_log and dt_bias.
struct SsdHeadSums {
  float d, a_log, dt_bias;
};

/// Adds the contributions [pieces, H] of all chunks in order; empty pieces are skipped.
void ssd_add_head_sums(mimo_stream& stream, const SsdHeadSums* sums, const int32_t* cu_seqlens, int64_t sequences,
                       int64_t pieces, int64_t heads, int64_t chunk, float* dd, float* da_log, float* ddt_bias);

}  // namespace mimo::cuda
