// cuDNN's attention graphs, built once a shape and kept.
//
// Query heads of several groups do not lie at one distance from each other (a fused projection has keys and values
// between them). A single sequence of such heads is given to cuDNN as a batch of groups; otherwise the queries are
// copied side by side. Sequences of different lengths go in as they are packed, with their lengths and offsets on the
// device; their number and the longest are rounded up, so that few graphs are built.
#include "cudnn_attention.h"

#include <cudnn_frontend.h>

#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>

#include "attention_layout.h"
#include "error.h"
#include "operations.h"
#include "status.h"
#include "vendor.h"

namespace mimo::cuda {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Uid : int64_t { q_uid = 1, k_uid, v_uid, o_uid, stats_uid, do_uid, dq_uid, dk_uid, dv_uid, length_uid, ragged_uid = 20 };

void check_cudnn(fe::error_t error, const char* what) {
  if (error.is_good()) return;
  throw Error(MIMO_ERROR_DEVICE, std::string("cuDNN failed at ") + what + ": " + error.get_message() + ".");
}

void check_cudnn(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Error(MIMO_ERROR_DEVICE, std::string("cuDNN failed at ") + what + ": " + cudnnGetErrorString(status) + ".");
}

/// Eight steps for every doubling.
int64_t rounded_up(int64_t value) {
  int64_t step = 1;
  while (step * 16 <= value) step *= 2;
  return (value + step - 1) / step * step;
}

/// Everything a graph depends on.
struct GraphKey {
  bool backward, ragged, causal, deterministic;
  int64_t batch, query_heads, key_heads, length, head_dim, tokens;
  AttentionStrides q, k, o, d_o, dq, dk;
  float scale;

  auto tied() const {
    return std::tie(backward, ragged, causal, deterministic, batch, query_heads, key_heads, length, head_dim, tokens, q.batch,
                    q.head, q.token, k.batch, k.head, k.token, o.batch, o.head, o.token, d_o.batch, d_o.head, d_o.token,
                    dq.batch, dq.head, dq.token, dk.batch, dk.head, dk.token, scale);
  }
  bool operator<(const GraphKey& other) const { return tied() < other.tied(); }
};

struct Graph {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace_bytes = 0;
};

/// Adds tensors of one attention to a graph.
class Builder {
 public:
  explicit Builder(const GraphKey& key) : key_(key), graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::shared_ptr<fe::graph::Graph> build() {
    const Tensor q = input(q_uid, "q", key_.query_heads, key_.q), k = input(k_uid, "k", key_.key_heads, key_.k);
    const Tensor v = input(v_uid, "v", key_.key_heads, key_.k);
    if (!key_.backward) {
      fe::graph::SDPA_attributes attributes;
      attributes.set_name("attention").set_generate_stats(true).set_attn_scale(key_.scale);
      attributes.set_causal_mask(key_.causal);
      add_lengths(attributes);
      auto [o, stats] = graph_->sdpa(q, k, v, attributes);
      output(o, o_uid, key_.query_heads, key_.o);
      stats->set_output(true).set_uid(stats_uid).set_data_type(fe::DataType_t::FLOAT);
      describe_stats(stats);
      return graph_;
    }
    const Tensor o = input(o_uid, "o", key_.query_heads, key_.o), d_o = input(do_uid, "d_o", key_.query_heads, key_.d_o);
    Tensor stats = graph_->tensor(fe::graph::Tensor_attributes()
                                      .set_name("stats")
                                      .set_uid(stats_uid)
                                      .set_data_type(fe::DataType_t::FLOAT)
                                      .set_dim({key_.batch, key_.query_heads, key_.length, 1})
                                      .set_stride({key_.query_heads * key_.length, key_.length, 1, 1}));
    describe_stats(stats);
    fe::graph::SDPA_backward_attributes attributes;
    attributes.set_name("attention_backward").set_attn_scale(key_.scale).set_causal_mask(key_.causal);
    attributes.set_deterministic_algorithm(key_.deterministic);
    add_lengths(attributes);
    if (key_.ragged) attributes.set_max_total_seq_len_q(key_.tokens).set_max_total_seq_len_kv(key_.tokens);
    auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, o, d_o, stats, attributes);
    output(dq, dq_uid, key_.query_heads, key_.dq);
    output(dk, dk_uid, key_.key_heads, key_.dk);
    output(dv, dv_uid, key_.key_heads, key_.dk);
    return graph_;
  }

 private:
  std::vector<int64_t> dims(int64_t heads) const { return {key_.batch, heads, key_.length, key_.head_dim}; }
  static std::vector<int64_t> strides(const AttentionStrides& s) { return {s.batch, s.head, s.token, 1}; }

  /// Offsets of packed sequences in elements of a tensor.
  Tensor offsets(int64_t uid) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name("offsets" + std::to_string(uid))
                              .set_uid(ragged_uid + uid)
                              .set_data_type(fe::DataType_t::INT32)
                              .set_dim({key_.batch + 1, 1, 1, 1})
                              .set_stride({1, 1, 1, 1}));
  }

  Tensor input(int64_t uid, const char* name, int64_t heads, const AttentionStrides& of) {
    Tensor tensor = graph_->tensor(
        fe::graph::Tensor_attributes().set_name(name).set_uid(uid).set_dim(dims(heads)).set_stride(strides(of)));
    if (key_.ragged) tensor->set_ragged_offset(offsets(uid));
    return tensor;
  }

  void output(const Tensor& tensor, int64_t uid, int64_t heads, const AttentionStrides& of) {
    tensor->set_output(true).set_uid(uid).set_dim(dims(heads)).set_stride(strides(of));
    if (key_.ragged) tensor->set_ragged_offset(offsets(uid));
  }

  /// Packed sequences keep theirs as [tokens, heads]; equal ones as [batch, heads, length].
  void describe_stats(const Tensor& stats) {
    if (!key_.ragged) return;
    stats->set_dim({key_.batch, key_.query_heads, key_.length, 1})
        .set_stride({key_.query_heads * key_.length, 1, key_.query_heads, 1})
        .set_ragged_offset(offsets(stats_uid));
  }

  template <class Attributes>
  void add_lengths(Attributes& attributes) {
    if (!key_.ragged) return;
    const Tensor lengths = graph_->tensor(fe::graph::Tensor_attributes()
                                              .set_name("lengths")
                                              .set_uid(length_uid)
                                              .set_data_type(fe::DataType_t::INT32)
                                              .set_dim({key_.batch, 1, 1, 1})
                                              .set_stride({1, 1, 1, 1}));
    attributes.set_padding_mask(true).set_seq_len_q(lengths).set_seq_len_kv(lengths);
  }

  const GraphKey& key_;
  std::shared_ptr<fe::graph::Graph> graph_;
};

}  // namespace

struct Cudnn::State {
  cudnnHandle_t handle = nullptr;
  std::map<GraphKey, Graph> graphs;

  const Graph& graph(const GraphKey& key) {
    const auto known = graphs.find(key);
    if (known != graphs.end()) return known->second;
    Graph made{Builder(key).build()};
    check_cudnn(made.graph->build(handle, {fe::HeurMode_t::A}), "building attention");
    made.workspace_bytes = made.graph->get_workspace_size();
    return graphs.emplace(key, std::move(made)).first->second;
  }

  void execute(mimo_stream& stream, const Graph& graph, std::unordered_map<int64_t, void*>& pointers) {
    check_cudnn(cudnnSetStream(handle, stream.handle()), "choosing a stream");
    Workspace workspace(&stream, graph.workspace_bytes);
    check_cudnn(graph.graph->execute(handle, pointers, workspace.as<void>()), "attention");
  }
};

Cudnn::Cudnn() : state_(std::make_unique<State>()) {
  open_vendor(Vendor::cudnn);
  check_cudnn(cudnnCreate(&state_->handle), "its start");
}

Cudnn::~Cudnn() {
  state_->graphs.clear();
  if (state_->handle != nullptr) cudnnDestroy(state_->handle);
}

namespace {

/// How a call is put to cuDNN.
template <class Args>
struct Plan {
  GraphKey key{};
  bool copies_queries = false;  // side by side: [tokens, query_heads, head_dim]

  explicit Plan(const Args& args) {
    const int64_t per_group = args.query_heads / args.key_heads, d = args.head_dim, width = args.query_heads * d;
    const bool equal = args.sequences == 1 || args.tokens == args.sequences * args.max_seqlen;
    const bool in_line = per_group == 1 || args.key_heads == 1;
    const bool by_groups = !in_line && args.sequences == 1;
    copies_queries = !in_line && !by_groups;
    key.ragged = !equal;
    key.causal = args.mask == MIMO_ATTENTION_CAUSAL;
    key.scale = args.softmax_scale;
    key.head_dim = d;
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
    key.o = lie(per_group * d, d, width);
  }
};

/// Copies queries (or their gradients) of every group between the projection's layout and side by side.
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

/// Lengths and offsets of packed sequences on the device, for as long as it lives.
class RaggedArrays {
 public:
  template <class Args>
  RaggedArrays(mimo_stream& stream, const Args& args, const GraphKey& key, std::map<int64_t, int64_t> token_strides,
               std::unordered_map<int64_t, void*>& pointers)
      : memory_(&stream, key.ragged ? static_cast<int64_t>(token_strides.size() + 1) * (key.batch + 1) * 4 : 0) {
    if (!key.ragged) return;
    int32_t* array = memory_.as<int32_t>();
    attention_lengths(stream, args.cu_seqlens, args.sequences, key.batch, array);
    pointers[length_uid] = array;
    for (const auto& [uid, stride] : token_strides) {
      if (args.tokens * stride > INT32_MAX) {
        throw Error(MIMO_ERROR_UNSUPPORTED, "Packed attention takes at most 2^31 elements a tensor; use shorter packs.");
      }
      array += key.batch + 1;
      attention_offsets(stream, args.cu_seqlens, args.sequences, key.batch, stride, array);
      pointers[ragged_uid + uid] = array;
    }
  }

 private:
  Workspace memory_;
};

}  // namespace

void Cudnn::attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args) {
  const Plan plan(args);
  const GraphKey& key = plan.key;
  const Graph& graph = state_->graph(key);
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
  const RaggedArrays ragged(stream, args, key,
                            {{q_uid, key.q.token},
                             {k_uid, key.k.token},
                             {v_uid, key.k.token},
                             {o_uid, key.o.token},
                             {stats_uid, args.query_heads}},
                            pointers);
  state_->execute(stream, graph, pointers);
  if (!key.ragged) attention_stats_to_lse(stream, stats.as<float>(), args.tokens, args.query_heads, key.length, args.lse);
}

void Cudnn::attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args) {
  Plan plan(args);
  GraphKey& key = plan.key;
  const int64_t d = args.head_dim, width = args.query_heads * d, per_group = width / args.key_heads;
  const bool by_groups = key.key_heads != args.key_heads;
  const auto lie = [&](int64_t group, int64_t head, int64_t token) {
    return by_groups ? AttentionStrides{group, head, token} : AttentionStrides{key.length * token, head, token};
  };
  key.backward = true;
  key.deterministic = stream.device->deterministic;
  key.d_o = lie(per_group, d, args.d_o_stride);
  key.dq = plan.copies_queries ? key.q : lie(args.group_stride, key.q.head, args.d_token_stride);
  key.dk = lie(args.group_stride, args.group_stride, args.d_token_stride);
  const Graph& graph = state_->graph(key);

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
  const RaggedArrays ragged(stream, args, key,
                            {{q_uid, key.q.token},
                             {k_uid, key.k.token},
                             {v_uid, key.k.token},
                             {o_uid, key.o.token},
                             {do_uid, key.d_o.token},
                             {stats_uid, args.query_heads},
                             {dq_uid, key.dq.token},
                             {dk_uid, key.dk.token},
                             {dv_uid, key.dk.token}},
                            pointers);
  state_->execute(stream, graph, pointers);
  if (plan.copies_queries) copy_queries(stream, args, dq, per_group, width, args.dq, args.group_stride, args.d_token_stride);
}

}  // namespace mimo::cuda
