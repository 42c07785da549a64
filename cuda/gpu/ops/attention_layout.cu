// Layout conversions around cuDNN's attention (attention_layout.h): softmax statistics, sequence lengths and offsets.
#include "attention_layout.h"

#include "kernel.cuh"

namespace mimo::cuda {
namespace {

/// Transposes between stats[(s heads + h) length + p] and lse[(s length + p) heads + h] for sequence s, head h,
/// position p.
template <bool to_lse>
__global__ void stats_kernel(const float* from, int64_t tokens, int64_t heads, int64_t length, float* to) {
  for_each_pack(tokens, heads, [&](int64_t token, int64_t head) {
    const int64_t stats = (token / length * heads + head) * length + token % length, lse = token * heads + head;
    to[to_lse ? lse : stats] = from[to_lse ? stats : lse];
  });
}

__global__ void lengths_kernel(const int32_t* cu_seqlens, int64_t sequences, int64_t batch, int32_t* lengths) {
  for_each_pack(1, batch, [&](int64_t, int64_t s) {
    lengths[s] = s < sequences ? cu_seqlens[s + 1] - cu_seqlens[s] : 0;
  });
}

__global__ void equal_lengths_kernel(int64_t length, int64_t batch, int32_t* lengths) {
  for_each_pack(1, batch, [&](int64_t, int64_t s) { lengths[s] = static_cast<int32_t>(length); });
}

__global__ void offsets_kernel(const int32_t* cu_seqlens, int64_t sequences, int64_t batch, int64_t stride,
                               int32_t* offsets) {
  for_each_pack(1, batch + 1, [&](int64_t, int64_t s) {
    offsets[s] = static_cast<int32_t>(cu_seqlens[smaller(s, sequences)] * stride);
  });
}

template <class Word>
__global__ void pad_kernel(bool back, AttentionRows packed, AttentionRows padded, PackedSequences sequences, int64_t groups,
                           int64_t words) {
  for_each_pack(sequences.tokens, groups * words, [&](int64_t token, int64_t index) {
    const int64_t sequence = sequence_of(sequences.cu_seqlens, sequences.sequences, token);
    const int64_t row = sequence * sequences.length + token - sequences.cu_seqlens[sequence];
    const int64_t group = index / words, word = index % words;
    Word* const one = reinterpret_cast<Word*>(static_cast<char*>(packed.data) + token * packed.token + group * packed.group) + word;
    Word* const two = reinterpret_cast<Word*>(static_cast<char*>(padded.data) + row * padded.token + group * padded.group) + word;
    back ? void(*one = *two) : void(*two = *one);
  });
}

}  // namespace

void attention_pad(mimo_stream& stream, bool back, const AttentionRows& packed, const AttentionRows& padded,
                   const PackedSequences& sequences, int64_t groups, int64_t bytes) {
  const auto run = [&](auto word) {
    constexpr int64_t size = static_cast<int64_t>(sizeof(word));
    const auto [grid, block] = cover(sequences.tokens, groups * bytes / size);
    launch(stream, pad_kernel<decltype(word)>, grid, block, 0, back, packed, padded, sequences, groups, bytes / size);
  };
  int64_t all = bytes;
  for (const AttentionRows* rows : {&packed, &padded}) {
    all |= rows->token | rows->group | static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows->data));
  }
  all % 16 == 0 ? run(uint4{}) : run(uint32_t{});
}

void attention_stats_to_lse(mimo_stream& stream, const float* stats, int64_t tokens, int64_t heads, int64_t length,
                            float* lse) {
  const auto [grid, block] = cover(tokens, heads);
  launch(stream, stats_kernel<true>, grid, block, 0, stats, tokens, heads, length, lse);
}

void attention_lse_to_stats(mimo_stream& stream, const float* lse, int64_t tokens, int64_t heads, int64_t length,
                            float* stats) {
  const auto [grid, block] = cover(tokens, heads);
  launch(stream, stats_kernel<false>, grid, block, 0, lse, tokens, heads, length, stats);
}

void attention_lengths(mimo_stream& stream, const int32_t* cu_seqlens, int64_t sequences, int64_t batch,
                       int32_t* lengths) {
  const auto [grid, block] = cover(1, batch);
  launch(stream, lengths_kernel, grid, block, 0, cu_seqlens, sequences, batch, lengths);
}

void attention_equal_lengths(mimo_stream& stream, int64_t length, int64_t batch, int32_t* lengths) {
  const auto [grid, block] = cover(1, batch);
  launch(stream, equal_lengths_kernel, grid, block, 0, length, batch, lengths);
}

void attention_offsets(mimo_stream& stream, const int32_t* cu_seqlens, int64_t sequences, int64_t batch, int64_t stride,
                       int32_t* offsets) {
  const auto [grid, block] = cover(1, batch + 1);
  launch(stream, offsets_kernel, grid, block, 0, cu_seqlens, sequences, batch, stride, offsets);
}

}  // namespace mimo::cuda
