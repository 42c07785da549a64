// Attention forward (docs/spec/language-model.md §3): o = softmax(scale q kᵀ) v within each sequence, in blocks of
// queries and keys with a running maximum and sum (Dao et al., FlashAttention-2), so that no row of scores is ever
// whole.
#include "attention.h"

namespace mimo::MIMO_ISA {
namespace {

/// Packed copies of all keys and values: per key head, per block of keys, kᵀ [head_dim, keys] and v [keys, head_dim].
struct PackedKeys {
  float* k;
  float* v;
};

/// Running softmax of one block of queries.
struct RunningRow {
  float maximum;  // of the scores so far, base 2
  float sum;
};

template <class T>
void pack_keys(const mimo_attention_forward_args& args, const SequenceBlock& block, int64_t head, const PackedKeys& to) {
  const int64_t token = block.begin + block.first;
  const int64_t from = token * args.token_stride + head * args.group_stride;
  const int64_t at = (head * args.tokens + token) * args.head_dim;
  transpose(static_cast<const T*>(args.k) + from, args.token_stride, block.rows, args.head_dim, to.k + at);
  gather(static_cast<const T*>(args.v) + from, args.token_stride, block.rows, args.head_dim, 1.0f, to.v + at);
}

/// Scores of `live` keys become unnormalised probabilities; the other `keys - live` are masked. Rescales the row's sums
/// when its maximum grows. Writes as far as whole_vectors(live).
void softmax_row(float* scores, int64_t live, int64_t keys, RunningRow& row, float* o, int64_t head_dim) {
  const int64_t whole = whole_vectors(live);
  for (int64_t j = live; j < whole; ++j) scores[j] = -INFINITY;
  float maximum = row.maximum;
#pragma omp simd reduction(max : maximum)
  for (int64_t j = 0; j < whole; ++j) maximum = scores[j] > maximum ? scores[j] : maximum;
  if (maximum > row.maximum) {
    const float rescale = exp2_fast(row.maximum - maximum);
    row.sum *= rescale;
#pragma omp simd
    for (int64_t i = 0; i < head_dim; ++i) o[i] *= rescale;
    row.maximum = maximum;
  }
  short_loop(whole, [=](int64_t j) { scores[j] = exp2_fast(scores[j] - maximum); });
  row.sum += sum_of_vectors(scores, whole);
  for (int64_t j = live; j < keys; ++j) scores[j] = 0;
}

template <class T>
void attend(mimo_stream& stream, const mimo_attention_forward_args& args, const SequenceBlock& block, int64_t head,
            const PackedKeys& packed) {
  const int64_t d = args.head_dim, keys_at_once = key_block(d), queries_at_once = query_block(d);
  const int64_t heads_per_group = args.query_heads / args.key_heads, group = head / heads_per_group;
  const bool causal = args.mask == MIMO_ATTENTION_CAUSAL;
  const int64_t token = block.begin + block.first;

  Workspace workspace(&stream, (2 * queries_at_once * d + queries_at_once * keys_at_once + keys_at_once) * 4);
  float* const q = workspace.as<float>();
  float* const o = q + queries_at_once * d;
  float* const scores = o + queries_at_once * d;
  float* const keep = scores + queries_at_once * keys_at_once;
  RunningRow rows[longest_query_block];
  for (auto& row : rows) row = RunningRow{-INFINITY, 0};
  std::memset(o, 0, static_cast<size_t>(block.rows * d) * sizeof(float));
  const T* q_head = static_cast<const T*>(args.q) + group * args.group_stride + head % heads_per_group * d;
  gather(q_head + token * args.token_stride, args.token_stride, block.rows, d, args.softmax_scale * log2_e, q);

  const int64_t key_end = causal ? block.first + block.rows : block.length;
  for (int64_t first_key = 0; first_key < key_end; first_key += keys_at_once) {
    const int64_t stored = block.length - first_key < keys_at_once ? block.length - first_key : keys_at_once;
    const int64_t keys = key_end - first_key < stored ? key_end - first_key : stored;
    const int64_t at = (group * args.tokens + block.begin + first_key) * d;
    product({q, packed.k + at, scores, d, d, stored, keys_at_once, 1, 0, false, false}, 0, block.rows, 0, keys);
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t seen = block.first + r + 1 - first_key;
      const int64_t live = !causal || seen > keys ? keys : (seen < 0 ? 0 : seen);
      float* row_scores = scores + r * keys_at_once;
      softmax_row(row_scores, live, keys, rows[r], o + r * d, d);
      if (args.dropout > 0) {
        const uint64_t row = static_cast<uint64_t>((args.first_token + token + r) * args.full_heads + args.first_head + head);
        dropout_factors(static_cast<uint64_t>(args.dropout_seed), row, first_key, keys, args.dropout, keep);
#pragma omp simd
        for (int64_t j = 0; j < keys; ++j) row_scores[j] *= keep[j];
      }
    }
    product({scores, packed.v + at, o, keys, keys_at_once, d, d, 1, 1, false, false}, 0, block.rows, 0, d);
  }
  for (int64_t r = 0; r < block.rows; ++r) {
    T* out = static_cast<T*>(args.o) + ((token + r) * args.query_heads + head) * d;
    scatter(o + r * d, 1, d, 1.0f / rows[r].sum, out, d);
    args.lse[(token + r) * args.query_heads + head] = rows[r].maximum * ln_2 + std::log(rows[r].sum);
  }
}

}  // namespace

void attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args) {
  require_attention(args);
  const int64_t query_blocks = count_blocks(args.cu_seqlens, args.sequences, query_block(args.head_dim));
  const int64_t key_blocks = count_blocks(args.cu_seqlens, args.sequences, key_block(args.head_dim));
  Workspace blocks(&stream, (query_blocks + key_blocks) * static_cast<int64_t>(sizeof(SequenceBlock)));
  SequenceBlock* const queries = blocks.as<SequenceBlock>();
  SequenceBlock* const keys = queries + query_blocks;
  cut_blocks(args.cu_seqlens, args.sequences, query_block(args.head_dim), queries);
  cut_blocks(args.cu_seqlens, args.sequences, key_block(args.head_dim), keys);

  const int64_t packed_elements = args.tokens * args.key_heads * args.head_dim;
  Workspace packed_memory(&stream, 2 * packed_elements * static_cast<int64_t>(sizeof(float)));
  const PackedKeys packed{packed_memory.as<float>(), packed_memory.as<float>() + packed_elements};
  ThreadPool& threads = stream.device->threads;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(threads, key_blocks * args.key_heads, [&](int64_t i) {
      pack_keys<T>(args, keys[i % key_blocks], i / key_blocks, packed);
    });
    // Causal rows get longer towards the end of a sequence: the long ones first, so that no thread ends with one.
    parallel_for(threads, query_blocks * args.query_heads, [&](int64_t i) {
      attend<T>(stream, args, queries[query_blocks - 1 - i % query_blocks], i / query_blocks, packed);
    });
  });
}

}  // namespace mimo::MIMO_ISA
