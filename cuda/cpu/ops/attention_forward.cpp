// Attention forward: o = softmax(scale q kᵀ) v within each sequence (docs/spec/language-model.md §3), over blocks of
// queries and keys with online softmax (Dao et al., FlashAttention-2).
#include "attention.h"

namespace mimo::MIMO_ISA {
namespace {

/// Score of a hidden key. It is finite: a row may have no other in its first blocks, and 2^(-inf + inf) is no number.
constexpr float hidden_score = -1e30f;

/// Packed copies of all keys and values, [tokens, head_dim] and [tokens, value_dim] for each key head.
struct PackedKeys {
  float* k;
  float* v;
};

/// Online softmax of one block of queries.
struct RunningRows {
  float maximum[longest_query_block];  // running maximum, base 2
  float sum[longest_query_block];
};

template <class T>
void pack_keys(const mimo_attention_forward_args& args, const SequenceBlock& block, int64_t head, const PackedKeys& to) {
  const int64_t token = block.begin + block.first;
  const int64_t from = token * args.token_stride + head * args.group_stride;
  const int64_t at = head * args.tokens + token, d = args.head_dim, e = args.value_dim;
  gather(static_cast<const T*>(args.k) + from, args.token_stride, block.rows, d, 1.0f, to.k + at * d);
  gather(static_cast<const T*>(args.v) + from, args.token_stride, block.rows, e, 1.0f, to.v + at * e);
}

/// Writes `masked` to the scores [keys, width] of keys after their query or before its window: key `open` is the first
/// after query 0, query `closed` the first whose window begins after key 0.
void mask_keys(float* scores, int64_t width, int64_t open, int64_t closed, int64_t keys, float masked) {
  for (int64_t j = 0; j < keys && j + closed < width; ++j) {
    for (int64_t q = j + closed > 0 ? j + closed : 0; q < width; ++q) scores[j * width + q] = masked;
  }
  for (int64_t j = open; j < keys; ++j) {
    const int64_t unseen = j - open + 1 < width ? j - open + 1 : width;
    for (int64_t q = 0; q < unseen; ++q) scores[j * width + q] = masked;
  }
}

/// Turns scores [keys, width] into unnormalised probabilities and rescales the sums and outputs oᵀ [value_dim, width] of
/// earlier keys to the new maxima. Queries run along the vector lanes, so there are no reductions across lanes.
void softmax_columns(float* scores, int64_t width, int64_t keys, RunningRows* rows, float* o, int64_t value_dim) {
  for (int64_t q = 0; q < width; q += lanes) {
    float* const column = scores + q;
    const Vector before = load_vector(rows->maximum + q);
    Vector even = before, odd = before;
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
      const Vector first = load_vector(column + j * width), second = load_vector(column + (j + 1) * width);
      even = first > even ? first : even;
      odd = second > odd ? second : odd;
    }
    if (j < keys) {
      const Vector last = load_vector(column + j * width);
      even = last > even ? last : even;
    }
    const Vector maximum = even > odd ? even : odd;
    const Vector rescale = exp2_of_lanes(before - maximum);
    for (int64_t i = 0; i < value_dim; ++i) store_vector(o + i * width + q, load_vector(o + i * width + q) * rescale);
    Vector sum = load_vector(rows->sum + q) * rescale;
    for (j = 0; j < keys; ++j) {
      const Vector p = exp2_of_lanes(load_vector(column + j * width) - maximum);
      store_vector(column + j * width, p);
      sum += p;
    }
    store_vector(rows->maximum + q, maximum);
    store_vector(rows->sum + q, sum);
  }
}

template <class T>
void attend(mimo_stream& stream, const mimo_attention_forward_args& args, const SequenceBlock& block, int64_t head,
            const PackedKeys& packed) {
  const int64_t d = args.head_dim, e = args.value_dim, keys_at_once = key_block(d), width = whole_vectors(block.rows);
  const int64_t heads_per_group = args.query_heads / args.key_heads, group = head / heads_per_group;
  const bool causal = args.mask == MIMO_ATTENTION_CAUSAL;
  const int64_t token = block.begin + block.first;

  Workspace workspace(&stream, (width * ((d > e ? d : e) + d + e) + width * keys_at_once + keys_at_once) * 4);
  float* const rows = workspace.as<float>();  // [width, d]: queries; at the end outputs [width, e]
  float* const q = rows + width * (d > e ? d : e);  // [d, width]
  float* const o = q + width * d;             // [e, width]
  float* const scores = o + width * e;        // [keys, width]
  float* const keep = scores + width * keys_at_once;
  RunningRows running;
  for (float& maximum : running.maximum) maximum = -INFINITY;
  for (float& sum : running.sum) sum = 0;
  std::memset(o, 0, static_cast<size_t>(width * e) * sizeof(float));
  const T* q_head = static_cast<const T*>(args.q) + group * args.group_stride + head % heads_per_group * d;
  gather(q_head + token * args.token_stride, args.token_stride, block.rows, d, args.softmax_scale * log2_e, rows);
  std::memset(rows + block.rows * d, 0, static_cast<size_t>((width - block.rows) * d) * sizeof(float));
  transpose(rows, d, width, d, q);

  const int64_t key_end = causal ? block.first + block.rows : block.length;
  const int64_t window = window_of(args), before = block.first - window + 1;
  for (int64_t first_key = before > 0 ? before / keys_at_once * keys_at_once : 0; first_key < key_end;
       first_key += keys_at_once) {
    const int64_t keys = key_end - first_key < keys_at_once ? key_end - first_key : keys_at_once;
    const int64_t open = causal ? block.first - first_key + 1 : keys;
    const int64_t closed = first_key - block.first + window;
    const int64_t at = group * args.tokens + block.begin + first_key;
    product({packed.k + at * d, q, scores, d, d, width, width, 1, 0, false, false}, 0, keys, 0, width);
    mask_keys(scores, width, open, closed, keys, hidden_score);
    softmax_columns(scores, width, keys, &running, o, e);
    mask_keys(scores, width, open, closed, keys, 0);
    for (int64_t r = 0; args.dropout > 0 && r < block.rows; ++r) {
      const uint64_t row = static_cast<uint64_t>((args.first_token + token + r) * args.full_heads + args.first_head + head);
      dropout_factors(static_cast<uint64_t>(args.dropout_seed), row, first_key, keys, args.dropout, keep);
      for (int64_t j = 0; j < keys; ++j) scores[j * width + r] *= keep[j];
    }
    product({packed.v + at * e, scores, o, keys, e, width, width, 1, 1, true, false}, 0, e, 0, width);
  }
  transpose(o, width, e, width, rows);
  for (int64_t r = 0; r < block.rows; ++r) {
    T* out = static_cast<T*>(args.o) + ((token + r) * args.query_heads + head) * e;
    scatter(rows + r * e, 1, e, 1.0f / running.sum[r], out, e);
    args.lse[(token + r) * args.query_heads + head] = running.maximum[r] * ln_2 + std::log(running.sum[r]);
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

  const int64_t packed_rows = args.tokens * args.key_heads;
  Workspace packed_memory(&stream, packed_rows * (args.head_dim + args.value_dim) * static_cast<int64_t>(sizeof(float)));
  const PackedKeys packed{packed_memory.as<float>(), packed_memory.as<float>() + packed_rows * args.head_dim};
  ThreadPool& threads = stream.device->threads;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(threads, key_blocks * args.key_heads, [&](int64_t i) {
      pack_keys<T>(args, keys[i % key_blocks], i / key_blocks, packed);
    });
    // Causal rows get longer towards the end of a sequence; the longest blocks go first, for load balance.
    parallel_for(threads, query_blocks * args.query_heads, [&](int64_t i) {
      attend<T>(stream, args, queries[query_blocks - 1 - i % query_blocks], i / query_blocks, packed);
    });
  });
}

}  // namespace mimo::MIMO_ISA
