// Shared by the kernels of the state space scan (docs/spec/language-model.md §2.3, §2.4). Sequences are cut into chunks
// anchored at their first tokens ("pieces" of kernel.cuh); chunks run side by side, and a pass over the chunks of a
// sequence carries the states from each to the next; on Hopper the kernel that makes the states carries them (sm90_ssd.cuh).
//
// Letters as in the specification: Q tokens of a chunk, cs the inclusive cumulative sum of a = A Δ inside a chunk, H_c the
// state before chunk c, S_c what the chunk adds to it, dS_c the gradient of the state after it.
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

/// Per-token numbers, [H, T] each.
struct SsdDecays {
  const float* step;  // Δ
  const float* sum;   // cs
};

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

/// Fills Δ and cs of every head; a warp a chunk and head.
void ssd_decays(mimo_stream& stream, const void* dt, int64_t dt_stride, const float* dt_bias, const float* a_log,
                float dt_minimum, const int32_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t heads,
                int64_t chunk, int32_t dtype, float* step, float* sum);

/// Carries states over the chunks of every sequence. Forward: to[c] = H_c from S_c; reverse: to[c] = dS_c from the gradients
/// U_c that chunk c gives the state before it. [pieces, H, elements] each; `to` may be `from` when it is fp32. The state past
/// the last chunk of every sequence goes to last_state [sequences, H, elements], or is dropped where that is null.
void ssd_pass(mimo_stream& stream, bool reverse, const float* from, void* to, int32_t to_dtype, float* last_state,
              const float* sum, const int32_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t heads,
              int64_t elements, int64_t chunk);

/// Parts of a chunk and head of the gradients of D, A_log and dt_bias.
struct SsdHeadSums {
  float d, a_log, dt_bias;
};

/// Adds the sums of all chunks, [pieces, H], in order; empty pieces are skipped.
void ssd_add_head_sums(mimo_stream& stream, const SsdHeadSums* sums, const int32_t* cu_seqlens, int64_t sequences,
                       int64_t pieces, int64_t heads, int64_t chunk, float* dd, float* da_log, float* ddt_bias);

}  // namespace mimo::cuda
