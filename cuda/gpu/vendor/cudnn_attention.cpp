// Maps attention calls to cuDNN graphs.
//
// Query heads of several groups are not equidistant in memory (in a fused projection keys and values lie between them).
// For a single sequence the groups become cuDNN's batch; otherwise the queries are copied to a contiguous tensor.
// Sequences of different lengths are passed packed, with lengths and offsets on the device; their number and the
// maximum length are rounded up, so that few graphs are built. cuDNN 9.14 computes wrong gradients of packed sequences
// with heads wider than 128: such sequences are copied to padded ones first.
#include "cudnn_attention.h"

#include "attention_layout.h"
#include "cudnn_graphs.h"
#include "error.h"
#include "operations.h"

namespace mimo::cuda {

Cudnn::Cudnn(Algorithms& algorithms) : graphs_(std::make_unique<CudnnGraphs>(algorithms)) {}
Cudnn::~Cudnn() = default;
int32_t Cudnn::time_algorithms(mimo_stream& stream) { return graphs_->time_algorithms(stream); }
void Cudnn::forget_plans() { graphs_->forget(); }

namespace {

/// Rounds up to one of eight steps for each power of two.
int64_t rounded_up(int64_t value) {
  int64_t step = 1;
  while (step * 16 <= value) step *= 2;
  return (value + step - 1) / step * step;
}

/// How a call is mapped to cuDNN.
template <class Args>
struct Plan {
  GraphKey key{};
  bool copies_queries = false;  // to a contiguous [tokens, query_heads, head_dim]

  explicit Plan(const Args& args) {
    const int64_t per_group = args.query_heads / args.key_heads, d = args.head_dim, e = args.value_dim;
    const int64_t width = args.query_heads * d;
    const bool equal = args.sequences == 1 || args.tokens == args.sequences * args.max_seqlen;
    const bool in_line = per_group == 1 || args.key_heads == 1;
    const bool by_groups = !in_line && args.sequences == 1;
    copies_queries = !in_line && !by_groups;
    key.ragged = key.lengths = !equal;
    key.causal = args.mask == MIMO_ATTENTION_CAUSAL;
    // A window that no sequence exceeds changes nothing, and the call shares the graph without a window.
    key.window = args.window < args.max_seqlen ? args.window : 0;
    key.scale = args.softmax_scale;
    key.head_dim = d;
    key.value_dim = e;
    key.query_heads = by_groups ? per_group : args.query_heads;
    key.key_heads = by_groups ? 1 : args.key_heads;
    key.length = equal ? args.tokens / args.sequences : rounded_up(args.max_seqlen);
    key.batch = by_groups ? args.key_heads : (equal ? args.sequences : rounded_up(args.sequences));
    key.tokens = equal ? 0 : rounded_up(args.tokens);
    const auto lie = [&](int64_t group, int64_t head, int64_t token) {
      return by_groups ? AttentionStrides{group, head, token} : AttentionStrides{key.length * token, head, token};
    };
    const int64_t query_head = per_group == 1 ? args.group_stride : d;
    key.q = copies_queries ? lie(per_group * d, d, width) : lie(args.group_stride, query_head, args.token_stride);
    key.k = lie(args.group_stride, args.group_stride, args.token_stride);
    key.o = lie(per_group * e, e, args.query_heads * e);
  }
};

/// Sequences of a batch that are padded to one length, which has few values.
struct Padded {
  int64_t batch, length;
  explicit Padded(const mimo_attention_backward_args& args)
      : batch(rounded_up(args.sequences)), length(rounded_up(args.max_seqlen)) {}
};
/// Tokens with padding to one token, at most: beyond, its memory is not worth it.
constexpr int64_t most_padding = 8;

bool needs_padding(const mimo_attention_backward_args& args) {
  return args.head_dim > 128 && args.head_dim == args.value_dim && Plan(args).key.ragged;
}

/// Copies queries (or their gradients) between the projection's layout and the contiguous one.
template <class Args>
void copy_queries(mimo_stream& stream, const Args& args, const void* from, int64_t from_group, int64_t from_token, void* to,
                  int64_t to_group, int64_t to_token) {
  for (int64_t group = 0; group < args.key_heads; ++group) {
    mimo_axpby_args copy{};
    copy.x = static_cast<const uint16_t*>(from) + group * from_group;
    copy.y = static_cast<uint16_t*>(to) + group * to_group;
    copy.rows = args.tokens;
    copy.width = args.query_heads / args.key_heads * args.head_dim;
    copy.x_stride = from_token;
    copy.y_stride = to_token;
    copy.alpha = 1.0f;
    copy.x_dtype = copy.y_dtype = MIMO_DTYPE_BF16;
    axpby(stream, copy);
  }
}

}  // namespace

void Cudnn::attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args) {
  const Plan plan(args);
  const GraphKey& key = plan.key;
  const int64_t width = args.query_heads * args.head_dim, per_group = width / args.key_heads;
  Workspace queries(&stream, plan.copies_queries ? args.tokens * width * 2 : 0);
  Workspace stats(&stream, key.ragged ? 0 : args.tokens * args.query_heads * 4);
  if (plan.copies_queries) {
    copy_queries(stream, args, args.q, args.group_stride, args.token_stride, queries.as<void>(), per_group, width);
  }
  std::unordered_map<int64_t, void*> pointers{
      {q_uid, plan.copies_queries ? queries.as<void>() : const_cast<void*>(args.q)},
      {k_uid, const_cast<void*>(args.k)},
      {v_uid, const_cast<void*>(args.v)},
      {o_uid, args.o},
      {stats_uid, key.ragged ? static_cast<void*>(args.lse) : stats.as<void>()}};
  const SequenceArrays arrays(stream, key.ragged ? args.cu_seqlens : nullptr, args.sequences, args.tokens, key, pointers);
  graphs_->execute(stream, key, pointers);
  if (!key.ragged) attention_stats_to_lse(stream, stats.as<float>(), args.tokens, args.query_heads, key.length, args.lse);
}

bool Cudnn::takes_gradient(const mimo_stream& stream, const mimo_attention_backward_args& args) {
  if (!takes(stream, args)) return false;
  if (!needs_padding(args)) return true;
  const Padded padded(args);
  return padded.batch * padded.length <= most_padding * args.tokens;
}

void Cudnn::attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args) {
  if (!needs_padding(args)) return backward(stream, args, nullptr, 0);
  const Padded padded(args);
  const int64_t d = args.head_dim, tokens = padded.batch * padded.length, heads = args.query_heads, width = heads * d;
  const int64_t per_group = heads / args.key_heads, group = (per_group + 2) * d, row = args.key_heads * group;
  // q, k and v as in a fused projection, o, d_o, and the log-sum-exp; then dq, dk and dv.
  const int64_t bytes = 2 * tokens * (row + 2 * width) + 4 * tokens * heads;
  Workspace inputs(&stream, bytes), gradients(&stream, 2 * tokens * row);
  check(cudaMemsetAsync(inputs.as<void>(), 0, static_cast<size_t>(bytes), stream.handle()), "clearing padding");
  uint16_t* const q = inputs.as<uint16_t>();
  uint16_t* const o = q + tokens * row;
  uint16_t* const d_o = o + tokens * width;
  float* const lse = reinterpret_cast<float*>(d_o + tokens * width);
  const auto move = [&](bool back, const void* packed, int64_t token, int64_t group_of_packed, void* to, int64_t padded_token,
                        int64_t padded_group, int64_t groups, int64_t bytes_of_group) {
    const AttentionRows from{const_cast<void*>(packed), token, group_of_packed}, into{to, padded_token, padded_group};
    attention_pad(stream, back, from, into, {args.cu_seqlens, args.sequences, args.tokens, padded.length}, groups, bytes_of_group);
  };
  const auto move_heads = [&](bool back, const void* packed, int64_t token_stride, void* to, int64_t count) {
    move(back, packed, 2 * token_stride, 2 * args.group_stride, to, 2 * row, 2 * group, args.key_heads, 2 * count * d);
  };
  move_heads(false, args.q, args.token_stride, q, per_group);
  move_heads(false, args.k, args.token_stride, q + per_group * d, 1);
  move_heads(false, args.v, args.token_stride, q + (per_group + 1) * d, 1);
  move(false, args.o, 2 * width, 0, o, 2 * width, 0, 1, 2 * width);
  move(false, args.d_o, 2 * args.d_o_stride, 0, d_o, 2 * width, 0, 1, 2 * width);
  move(false, args.lse, 4 * heads, 0, lse, 4 * heads, 0, 1, 4 * heads);
  mimo_attention_backward_args of_padded = args;
  uint16_t* const dq = gradients.as<uint16_t>();
  of_padded.q = q, of_padded.k = q + per_group * d, of_padded.v = q + (per_group + 1) * d;
  of_padded.o = o, of_padded.d_o = d_o, of_padded.lse = lse;
  of_padded.dq = dq, of_padded.dk = dq + per_group * d, of_padded.dv = dq + (per_group + 1) * d;
  of_padded.token_stride = of_padded.d_token_stride = row, of_padded.group_stride = group, of_padded.d_o_stride = width;
  of_padded.sequences = padded.batch, of_padded.tokens = tokens, of_padded.max_seqlen = padded.length;
  backward(stream, of_padded, args.cu_seqlens, args.sequences);
  move_heads(true, args.dq, args.d_token_stride, dq, per_group);
  move_heads(true, args.dk, args.d_token_stride, dq + per_group * d, 1);
  move_heads(true, args.dv, args.d_token_stride, dq + (per_group + 1) * d, 1);
}

void Cudnn::backward(mimo_stream& stream, const mimo_attention_backward_args& args, const int32_t* of_padded, int64_t sequences) {
  Plan plan(args);
  GraphKey& key = plan.key;
  const int64_t width = args.query_heads * args.head_dim, per_group = width / args.key_heads, e = args.value_dim;
  const bool by_groups = key.key_heads != args.key_heads;
  const auto lie = [&](int64_t group, int64_t head, int64_t token) {
    return by_groups ? AttentionStrides{group, head, token} : AttentionStrides{key.length * token, head, token};
  };
  key.backward = true;
  key.lengths = key.ragged || of_padded != nullptr || gradient_takes_lengths(key.length);
  key.deterministic = stream.device->deterministic;
  key.d_o = lie(args.query_heads / args.key_heads * e, e, args.d_o_stride);
  key.dq = plan.copies_queries ? key.q : lie(args.group_stride, key.q.head, args.d_token_stride);
  key.dk = lie(args.group_stride, args.group_stride, args.d_token_stride);

  Workspace queries(&stream, plan.copies_queries ? 2 * args.tokens * width * 2 : 0);
  Workspace stats(&stream, key.ragged ? 0 : args.tokens * args.query_heads * 4);
  uint16_t* const dq = plan.copies_queries ? queries.as<uint16_t>() + args.tokens * width : nullptr;
  if (plan.copies_queries) {
    copy_queries(stream, args, args.q, args.group_stride, args.token_stride, queries.as<void>(), per_group, width);
  }
  if (!key.ragged) attention_lse_to_stats(stream, args.lse, args.tokens, args.query_heads, key.length, stats.as<float>());
  std::unordered_map<int64_t, void*> pointers{
      {q_uid, plan.copies_queries ? queries.as<void>() : const_cast<void*>(args.q)},
      {k_uid, const_cast<void*>(args.k)},
      {v_uid, const_cast<void*>(args.v)},
      {o_uid, const_cast<void*>(args.o)},
      {do_uid, const_cast<void*>(args.d_o)},
      {stats_uid, key.ragged ? const_cast<float*>(args.lse) : stats.as<void>()},
      {dq_uid, plan.copies_queries ? dq : args.dq},
      {dk_uid, args.dk},
      {dv_uid, args.dv}};
  const bool known = of_padded != nullptr;
  const SequenceArrays arrays(stream, known ? of_padded : key.ragged ? args.cu_seqlens : nullptr,
                              known ? sequences : args.sequences, args.tokens, key, pointers);
  graphs_->execute(stream, key, pointers);
  if (plan.copies_queries) copy_queries(stream, args, dq, per_group, width, args.dq, args.group_stride, args.d_token_stride);
}

}  // namespace mimo::cuda
