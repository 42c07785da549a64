// Small moves around cuDNN's attention: where it wants other layouts than mimo.h has.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Elements between consecutive batch items, heads and tokens.
struct AttentionStrides {
  int64_t batch, head, token;
};

/// lse [tokens, heads] from stats [batch, heads, length], and back; batches of groups and of sequences alike.
void attention_stats_to_lse(mimo_stream& stream, const float* stats, int64_t tokens, int64_t heads, int64_t length,
                            float* lse);
void attention_lse_to_stats(mimo_stream& stream, const float* lse, int64_t tokens, int64_t heads, int64_t length,
                            float* stats);

/// Lengths of the sequences, zeros up to `batch`.
void attention_lengths(mimo_stream& stream, const int32_t* cu_seqlens, int64_t sequences, int64_t batch,
                       int32_t* lengths);
/// First elements of the sequences, batch + 1 of them; those past the last are the end.
void attention_offsets(mimo_stream& stream, const int32_t* cu_seqlens, int64_t sequences, int64_t batch, int64_t stride,
                       int32_t* offsets);

}  // namespace mimo::cuda
