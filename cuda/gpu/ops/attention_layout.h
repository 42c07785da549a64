// Conversions between mimo.h's layouts and those that cuDNN's attention takes.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Elements between consecutive batch items, heads and tokens.
struct AttentionStrides {
  int64_t batch, head, token;
};

/// lse [tokens, heads] from stats [batch, heads, length] and back; a batch entry is a sequence or a group of heads.
void attention_stats_to_lse(mimo_stream& stream, const float* stats, int64_t tokens, int64_t heads, int64_t length,
                            float* lse);
void attention_lse_to_stats(mimo_stream& stream, const float* lse, int64_t tokens, int64_t heads, int64_t length,
                            float* stats);

/// Rows of a token each, in bytes: groups of columns `group` apart.
struct AttentionRows {
  void* data;
  int64_t token, group;
};
/// Packed sequences; `length`: rows of each where they are padded.
struct PackedSequences {
  const int32_t* cu_seqlens;
  int64_t sequences, tokens, length;
};
/// Copies `groups` of `bytes` (a multiple of 4) of every token from packed to padded rows, or back.
void attention_pad(mimo_stream& stream, bool back, const AttentionRows& packed, const AttentionRows& padded,
                   const PackedSequences& sequences, int64_t groups, int64_t bytes);

/// Sequence lengths, padded with zeros to `batch` entries.
void attention_lengths(mimo_stream& stream, const int32_t* cu_seqlens, int64_t sequences, int64_t batch,
                       int32_t* lengths);
/// `batch` entries of `length`.
void attention_equal_lengths(mimo_stream& stream, int64_t length, int64_t batch, int32_t* lengths);
/// Element offsets of the sequences, batch + 1 entries; entries past the last sequence repeat the end.
void attention_offsets(mimo_stream& stream, const int32_t* cu_seqlens, int64_t sequences, int64_t batch, int64_t stride,
                       int32_t* offsets);

}  // namespace mimo::cuda
