// Attention backward (Dao et al., FlashAttention-2, algorithm 2): probabilities are recomputed block by block from the
// log-sum-exp. A work item is one query head of one sequence with its dq and its own dk and dv; those of query heads
// that share a key head are then summed in order.
//
//   p = exp(scale q kᵀ - lse)   dv = pᵀ do   dp = do vᵀ   ds = p (dp - Σ_i do_i o_i)   dq = scale ds k   dk = scale dsᵀ q
#include "attention.h"

namespace mimo::MIMO_ISA {
namespace {

/// Packed copies of all keys and values, by key head: kᵀ in blocks [head_dim, keys], vᵀ likewise, k as [tokens, head_dim].
struct PackedKeys {
  float* k;
  float* k_transposed;
  float* v_transposed;
};

/// dk of every query head, [query_heads, tokens, head_dim], and dv; null if every query head has its own keys.
struct PartialGradients {
  float* dk;
  float* dv;
};

template <class T>
void pack_keys(const mimo_attention_backward_args& args, const SequenceBlock& block, int64_t head,
               const PackedKeys& to) {
  const int64_t token = block.begin + block.first, d = args.head_dim, e = args.value_dim;
  const int64_t from = token * args.token_stride + head * args.group_stride;
  const int64_t at = head * args.tokens + token;
  const T* k = static_cast<const T*>(args.k) + from;
  gather(k, args.token_stride, block.rows, d, 1.0f, to.k + at * d);
  transpose(k, args.token_stride, block.rows, d, to.k_transposed + at * d);
  transpose(static_cast<const T*>(args.v) + from, args.token_stride, block.rows, e, to.v_transposed + at * e);
}

/// One row: scores become (dropped-out) probabilities, dp becomes ds. keep: dropout factors, or null. Writes up to
/// whole_vectors(live).
void softmax_backward_row(float* scores, float* dp, int64_t live, int64_t keys, float lse, float dot,
                          const float* keep) {
  const int64_t whole = whole_vectors(live);
  if (keep == nullptr) {
    short_loop(whole, [=](int64_t j) {
      const float p = exp2_fast(scores[j] - lse);
      scores[j] = p;
      dp[j] = p * (dp[j] - dot);
    });
  } else {
#pragma omp simd
    for (int64_t j = 0; j < whole; ++j) {
      const float p = exp2_fast(scores[j] - lse);
      scores[j] = p * keep[j];
      dp[j] = p * (dp[j] * keep[j] - dot);
    }
  }
  for (int64_t j = live; j < keys; ++j) scores[j] = dp[j] = 0;
}

/// Computes the gradients of query head `head` in one sequence of `length` tokens that starts at token `begin`.
template <class T>
void differentiate(mimo_stream& stream, const mimo_attention_backward_args& args, int64_t begin, int64_t length,
                   int64_t head, const PackedKeys& packed, const PartialGradients& partial) {
  const int64_t d = args.head_dim, e = args.value_dim, keys_at_once = key_block(d), queries_at_once = query_block(d);
  const int64_t heads_per_group = args.query_heads / args.key_heads, group = head / heads_per_group;
  const int64_t head_offset = group * args.group_stride + head % heads_per_group * d;
  const bool causal = args.mask == MIMO_ATTENTION_CAUSAL;
  const int64_t window = window_of(args);

  Workspace workspace(&stream, (length * (2 * d + e + 2) + 2 * queries_at_once * keys_at_once + keys_at_once * (d + e) +
                                keys_at_once) * static_cast<int64_t>(sizeof(float)));
  float* const q = workspace.as<float>();
  float* const d_o = q + length * d;
  float* const dq = d_o + length * e;
  float* const scores = dq + length * d;
  float* const dp = scores + queries_at_once * keys_at_once;
  float* const dk = dp + queries_at_once * keys_at_once;
  float* const dv = dk + keys_at_once * d;
  float* const keep = dv + keys_at_once * e;
  float* const lse = keep + keys_at_once;
  float* const dot = lse + length;

  gather(static_cast<const T*>(args.q) + begin * args.token_stride + head_offset, args.token_stride, length, d,
         args.softmax_scale * log2_e, q);
  gather(static_cast<const T*>(args.d_o) + begin * args.d_o_stride + head * e, args.d_o_stride, length, e, 1.0f, d_o);
  std::memset(dq, 0, static_cast<size_t>(length * d) * sizeof(float));
  for (int64_t r = 0; r < length; ++r) {
    const T* o = static_cast<const T*>(args.o) + ((begin + r) * args.query_heads + head) * e;
    dot[r] = short_dot(o, d_o + r * e, e);
    lse[r] = args.lse[(begin + r) * args.query_heads + head] * log2_e;
  }

  for (int64_t first_key = 0; first_key < length; first_key += keys_at_once) {
    const int64_t stored = length - first_key < keys_at_once ? length - first_key : keys_at_once;
    const int64_t at = group * args.tokens + begin + first_key;
    std::memset(dk, 0, static_cast<size_t>(stored * d) * sizeof(float));
    std::memset(dv, 0, static_cast<size_t>(stored * e) * sizeof(float));
    const int64_t seen_by = first_key + stored + window - 1, query_end = seen_by < length ? seen_by : length;
    for (int64_t first = causal ? first_key / queries_at_once * queries_at_once : 0; first < query_end;
         first += queries_at_once) {
      const int64_t rows = length - first < queries_at_once ? length - first : queries_at_once;
      const int64_t seen_last = causal ? first + rows - first_key : stored;
      const int64_t keys = seen_last < stored ? seen_last : stored;
      const float* q_rows = q + first * d;
      const float* do_rows = d_o + first * e;
      product({q_rows, packed.k_transposed + at * d, scores, d, d, stored, keys_at_once, 1, 0, false, false}, 0, rows, 0,
              keys);
      product({do_rows, packed.v_transposed + at * e, dp, e, e, stored, keys_at_once, 1, 0, false, false}, 0, rows, 0, keys);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t seen = first + r + 1 - first_key;
        const int64_t live = !causal || seen > keys ? keys : (seen < 0 ? 0 : seen);
        if (args.dropout > 0) {
          const uint64_t row = static_cast<uint64_t>((args.first_token + begin + first + r) * args.full_heads +
                                                     args.first_head + head);
          dropout_factors(static_cast<uint64_t>(args.dropout_seed), row, first_key, keys, args.dropout, keep);
        }
        softmax_backward_row(scores + r * keys_at_once, dp + r * keys_at_once, live, keys, lse[first + r],
                             dot[first + r], args.dropout > 0 ? keep : nullptr);
        for (int64_t j = 0; j < live && j <= first + r - window - first_key; ++j) {
          scores[r * keys_at_once + j] = dp[r * keys_at_once + j] = 0;
        }
      }
      product({scores, do_rows, dv, rows, keys_at_once, e, e, 1, 1, true, false}, 0, keys, 0, e);
      // q was scaled by scale * log2 e.
      product({dp, q_rows, dk, rows, keys_at_once, d, d, ln_2, 1, true, false}, 0, keys, 0, d);
      product({dp, packed.k + at * d, dq + first * d, keys, keys_at_once, d, d, args.softmax_scale, 1, false, false}, 0,
              rows, 0, d);
    }
    const int64_t token = begin + first_key;
    if (partial.dk != nullptr) {
      std::memcpy(partial.dk + (head * args.tokens + token) * d, dk, static_cast<size_t>(stored * d) * sizeof(float));
      std::memcpy(partial.dv + (head * args.tokens + token) * e, dv, static_cast<size_t>(stored * e) * sizeof(float));
    } else {
      const int64_t to = token * args.d_token_stride + group * args.group_stride;
      scatter(dk, stored, d, 1.0f, static_cast<T*>(args.dk) + to, args.d_token_stride);
      scatter(dv, stored, e, 1.0f, static_cast<T*>(args.dv) + to, args.d_token_stride);
    }
  }
  scatter(dq, length, d, 1.0f, static_cast<T*>(args.dq) + begin * args.d_token_stride + head_offset,
          args.d_token_stride);
}

/// dk or dv of one token and key head, of d columns: the sum over its query heads, in order.
template <class T>
void sum_heads(const mimo_attention_backward_args& args, const float* partial, int64_t d, int64_t token,
               int64_t group, void* gradient) {
  const int64_t heads_per_group = args.query_heads / args.key_heads;
  T* to = static_cast<T*>(gradient) + token * args.d_token_stride + group * args.group_stride;
  const float* const first = partial + (group * heads_per_group * args.tokens + token) * d;
  const int64_t between = args.tokens * d;
  int64_t i = 0;
  for (; i + lanes <= d; i += lanes) {
    Vector sum = load_vector(first + i);
    for (int64_t r = 1; r < heads_per_group; ++r) sum += load_vector(first + r * between + i);
    store_vector(to + i, sum);
  }
  for (; i < d; ++i) {
    float sum = 0;
    for (int64_t r = 0; r < heads_per_group; ++r) sum += first[r * between + i];
    store(&to[i], sum);
  }
}

}  // namespace

void attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args) {
  require_attention(args);
  const int64_t d = args.head_dim, e = args.value_dim;
  const int64_t key_blocks = count_blocks(args.cu_seqlens, args.sequences, key_block(d));
  Workspace blocks(&stream, key_blocks * static_cast<int64_t>(sizeof(SequenceBlock)));
  SequenceBlock* const keys = blocks.as<SequenceBlock>();
  cut_blocks(args.cu_seqlens, args.sequences, key_block(d), keys);

  const int64_t packed_elements = args.tokens * args.key_heads * d, packed_values = args.tokens * args.key_heads * e;
  const bool grouped = args.query_heads > args.key_heads;
  const int64_t partial_rows = grouped ? args.tokens * args.query_heads : 0;
  Workspace packed_memory(&stream, (2 * packed_elements + packed_values) * static_cast<int64_t>(sizeof(float)));
  Workspace partial_memory(&stream, partial_rows * (d + e) * static_cast<int64_t>(sizeof(float)));
  const PackedKeys packed{packed_memory.as<float>(), packed_memory.as<float>() + packed_elements,
                          packed_memory.as<float>() + 2 * packed_elements};
  PartialGradients partial{nullptr, nullptr};
  if (grouped) partial = {partial_memory.as<float>(), partial_memory.as<float>() + partial_rows * d};

  ThreadPool& threads = stream.device->threads;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(threads, key_blocks * args.key_heads, [&](int64_t i) {
      pack_keys<T>(args, keys[i % key_blocks], i / key_blocks, packed);
    });
    parallel_for(threads, args.sequences * args.query_heads, [&](int64_t i) {
      const int64_t sequence = i / args.query_heads, begin = args.cu_seqlens[sequence];
      const int64_t length = args.cu_seqlens[sequence + 1] - begin;
      if (length > 0) differentiate<T>(stream, args, begin, length, i % args.query_heads, packed, partial);
    });
    if (!grouped) return;
    parallel_range(threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t group = 0; group < args.key_heads; ++group) {
          sum_heads<T>(args, partial.dk, d, token, group, args.dk);
          sum_heads<T>(args, partial.dv, e, token, group, args.dv);
        }
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
