#include "cudnn_graphs.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <vector>

#include "algorithms.h"
#include "error.h"
#include "status.h"
#include "vendor.h"

namespace mimo::cuda {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

void check_cudnn(fe::error_t error, const char* what) {
  if (error.is_good()) return;
  throw Error(MIMO_ERROR_DEVICE, std::string("cuDNN failed at ") + what + ": " + error.get_message() + ".");
}

void check_cudnn(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Error(MIMO_ERROR_DEVICE, std::string("cuDNN failed at ") + what + ": " + cudnnGetErrorString(status) + ".");
}

struct Graph {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t plan = 0;  // index of the graph's plan that runs
  int64_t workspace_bytes = 0;
};

/// Builds the graph of one attention.
class Builder {
 public:
  explicit Builder(const GraphKey& key) : key_(key), graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::shared_ptr<fe::graph::Graph> build() {
    const Tensor q = input(q_uid, "q", key_.query_heads, key_.head_dim, key_.q);
    const Tensor k = input(k_uid, "k", key_.key_heads, key_.head_dim, key_.k);
    const Tensor v = input(v_uid, "v", key_.key_heads, key_.value_dim, key_.k);
    if (!key_.backward) {
      fe::graph::SDPA_attributes attributes;
      attributes.set_name("attention").set_generate_stats(true).set_attn_scale(key_.scale);
      add_mask(attributes);
      add_lengths(attributes);
      auto [o, stats] = graph_->sdpa(q, k, v, attributes);
      output(o, o_uid, key_.query_heads, key_.value_dim, key_.o);
      stats->set_output(true).set_uid(stats_uid).set_data_type(fe::DataType_t::FLOAT);
      describe_stats(stats);
      return graph_;
    }
    const Tensor o = input(o_uid, "o", key_.query_heads, key_.value_dim, key_.o);
    const Tensor d_o = input(do_uid, "d_o", key_.query_heads, key_.value_dim, key_.d_o);
    Tensor stats = graph_->tensor(fe::graph::Tensor_attributes()
                                      .set_name("stats")
                                      .set_uid(stats_uid)
                                      .set_data_type(fe::DataType_t::FLOAT)
                                      .set_dim({key_.batch, key_.query_heads, key_.length, 1})
                                      .set_stride({key_.query_heads * key_.length, key_.length, 1, 1}));
    describe_stats(stats);
    fe::graph::SDPA_backward_attributes attributes;
    attributes.set_name("attention_backward").set_attn_scale(key_.scale);
    add_mask(attributes);
    attributes.set_deterministic_algorithm(key_.deterministic);
    add_lengths(attributes);
    if (key_.ragged) attributes.set_max_total_seq_len_q(key_.tokens).set_max_total_seq_len_kv(key_.tokens);
    auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, o, d_o, stats, attributes);
    output(dq, dq_uid, key_.query_heads, key_.head_dim, key_.dq);
    output(dk, dk_uid, key_.key_heads, key_.head_dim, key_.dk);
    output(dv, dv_uid, key_.key_heads, key_.value_dim, key_.dk);
    return graph_;
  }

 private:
  std::vector<int64_t> dims(int64_t heads, int64_t width) const { return {key_.batch, heads, key_.length, width}; }
  static std::vector<int64_t> strides(const AttentionStrides& s) { return {s.batch, s.head, s.token, 1}; }

  /// Offsets of packed sequences, in elements of a tensor.
  Tensor offsets(int64_t uid) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name("offsets" + std::to_string(uid))
                              .set_uid(ragged_uid + uid)
                              .set_data_type(fe::DataType_t::INT32)
                              .set_dim({key_.batch + 1, 1, 1, 1})
                              .set_stride({1, 1, 1, 1}));
  }

  Tensor input(int64_t uid, const char* name, int64_t heads, int64_t width, const AttentionStrides& of) {
    Tensor tensor = graph_->tensor(
        fe::graph::Tensor_attributes().set_name(name).set_uid(uid).set_dim(dims(heads, width)).set_stride(strides(of)));
    if (key_.ragged) tensor->set_ragged_offset(offsets(uid));
    return tensor;
  }

  void output(const Tensor& tensor, int64_t uid, int64_t heads, int64_t width, const AttentionStrides& of) {
    tensor->set_output(true).set_uid(uid).set_dim(dims(heads, width)).set_stride(strides(of));
    if (key_.ragged) tensor->set_ragged_offset(offsets(uid));
  }

  /// Statistics are [tokens, heads] for packed sequences, [batch, heads, length] for equal ones.
  void describe_stats(const Tensor& stats) {
    if (!key_.ragged) return;
    stats->set_dim({key_.batch, key_.query_heads, key_.length, 1})
        .set_stride({key_.query_heads * key_.length, 1, key_.query_heads, 1})
        .set_ragged_offset(offsets(stats_uid));
  }

  template <class Attributes>
  void add_mask(Attributes& attributes) const {
    attributes.set_causal_mask(key_.causal);
    if (key_.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(key_.window));
  }

  template <class Attributes>
  void add_lengths(Attributes& attributes) {
    if (!key_.lengths) return;
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

/// The key under which `Algorithms` stores a choice.
std::string text_of(const GraphKey& key) {
  std::string text = key.backward ? "attention backward" : "attention";
  if (key.ragged) add_values(text, "packed", {key.tokens});
  if (key.causal) text += " causal";
  if (key.window > 0) add_values(text, "window", {key.window});
  if (key.deterministic) text += " deterministic";
  add_values(text, "sequences", {key.batch});
  add_values(text, "length", {key.length});
  add_values(text, "heads", {key.query_heads, key.key_heads, key.head_dim});
  if (key.value_dim != key.head_dim) add_values(text, "values", {key.value_dim});
  for (const AttentionStrides& of : {key.q, key.k, key.o}) add_values(text, "strides", {of.batch, of.head, of.token});
  if (!key.backward) return text;
  for (const AttentionStrides& of : {key.d_o, key.dq, key.dk}) add_values(text, "strides", {of.batch, of.head, of.token});
  return text;
}

using Knobs = std::unordered_map<fe::KnobType_t, int64_t>;

/// A cuDNN engine and its knobs as text: "5 12=3 26=1". Empty if the front end has no number for a knob.
std::string text_of_plan(const fe::graph::Graph& graph, int64_t plan) {
  int64_t engine = 0;
  Knobs knobs;
  check_cudnn(graph.get_engine_and_knobs_at_index(plan, engine, knobs), "describing a plan of attention");
  if (knobs.count(fe::KnobType_t::NOT_SET) > 0) return "";
  std::string text = std::to_string(engine);
  for (const auto& [type, value] : std::map<fe::KnobType_t, int64_t>(knobs.begin(), knobs.end())) {
    text.append(" ").append(std::to_string(static_cast<int64_t>(type))).append("=").append(std::to_string(value));
  }
  return text;
}

/// Builds the plan of a choice as the graph's plan 0. Returns whether that succeeds.
bool build_choice(fe::graph::Graph& graph, const std::string& choice) {
  std::istringstream text(choice);
  int64_t engine = 0, type = 0, value = 0;
  Knobs knobs;
  text >> engine;
  for (char equals = 0; text >> type >> equals >> value;) knobs[static_cast<fe::KnobType_t>(type)] = value;
  return graph.create_execution_plan(engine, knobs).is_good() && graph.build_plan_at_index(0).is_good();
}

/// Adds plans that differ from the first in one knob's value; cuDNN refuses some of them, now or when they are built.
void add_neighbours(fe::graph::Graph& graph) {
  constexpr int64_t most_values = 16;
  int64_t engine = 0;
  Knobs knobs;
  std::vector<fe::Knob> ranges;
  if (graph.get_engine_and_knobs_at_index(0, engine, knobs).is_bad()) return;
  if (graph.get_knobs_for_engine(engine, ranges).is_bad()) return;
  for (const fe::Knob& range : ranges) {
    const auto now = knobs.find(range.type);
    if (now == knobs.end() || range.stride <= 0 || (range.maxValue - range.minValue) / range.stride >= most_values) continue;
    for (int64_t value = range.minValue; value <= range.maxValue; value += range.stride) {
      Knobs changed = knobs;
      changed[range.type] = value;
      if (value != now->second) static_cast<void>(graph.create_execution_plan(engine, changed));
    }
  }
}

std::shared_ptr<fe::graph::Graph> without_plans(const GraphKey& key, cudnnHandle_t handle) {
  std::shared_ptr<fe::graph::Graph> graph = Builder(key).build();
  check_cudnn(graph->validate(), "describing attention");
  check_cudnn(graph->build_operation_graph(handle), "describing attention");
  return graph;
}

}  // namespace

struct CudnnGraphs::State {
  explicit State(Algorithms& of_device) : algorithms(of_device) {}

  Algorithms& algorithms;
  cudnnHandle_t handle = nullptr;
  std::map<GraphKey, Graph> graphs;

  const Graph& graph(const GraphKey& key) {
    const auto known = graphs.find(key);
    if (known != graphs.end()) return known->second;
    const std::string* choice = algorithms.find(text_of(key));
    return graphs.emplace(key, choice != nullptr ? chosen(key, *choice) : answered(key)).first->second;
  }

  /// Builds the first plan of cuDNN's heuristics that can be built.
  Graph answered(const GraphKey& key) {
    Graph made{Builder(key).build()};
    check_cudnn(made.graph->build(handle, {fe::HeurMode_t::A}), "building attention");
    made.workspace_bytes = made.graph->get_workspace_size();
    made.plan = -1;
    return made;
  }

  Graph chosen(const GraphKey& key, const std::string& choice) {
    Graph made{without_plans(key, handle)};
    if (!build_choice(*made.graph, choice)) {
      throw Error(MIMO_ERROR_UNSUPPORTED, "This cuDNN does not take the chosen plan of " + text_of(key) +
                                              ": choose again with this GPU, driver and cuDNN.");
    }
    made.workspace_bytes = made.graph->get_workspace_size_plan_at_index(made.plan);
    return made;
  }

  void execute(mimo_stream& stream, const Graph& graph, std::unordered_map<int64_t, void*>& pointers) {
    check_cudnn(cudnnSetStream(handle, stream.handle()), "choosing a stream");
    Workspace workspace(&stream, graph.workspace_bytes);
    check_cudnn(graph.plan < 0 ? graph.graph->execute(handle, pointers, workspace.as<void>())
                               : graph.graph->execute_plan_at_index(handle, pointers, workspace.as<void>(), graph.plan),
                "attention");
  }

  std::vector<Graph> candidates(const GraphKey& key);
  void time_graph(mimo_stream& stream, const GraphKey& key);
};

/// The distinct plans that can be built: those of cuDNN's heuristics in order, the first answer in front, and the
/// first's neighbours. A knob may make a gradient non-deterministic: in deterministic mode there are no neighbours.
std::vector<Graph> CudnnGraphs::State::candidates(const GraphKey& key) {
  constexpr size_t most = 24;
  const std::shared_ptr<fe::graph::Graph> graph = without_plans(key, handle);
  check_cudnn(graph->create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::B, fe::HeurMode_t::FALLBACK}),
              "looking for plans of attention");
  if (key.deterministic) {
    graph->deselect_numeric_notes({fe::NumericalNote_t::NONDETERMINISTIC});
  } else {
    add_neighbours(*graph);
  }
  std::set<std::string> known{""};
  std::vector<Graph> found;
  for (int64_t plan = 0; plan < graph->get_execution_plan_count() && found.size() < most; ++plan) {
    if (!known.insert(text_of_plan(*graph, plan)).second || graph->build_plan_at_index(plan).is_bad()) continue;
    found.push_back({graph, plan, graph->get_workspace_size_plan_at_index(plan)});
  }
  return found;
}

namespace {

/// Memory of a graph's tensors, with values as in training.
class Tensors {
 public:
  Tensors(mimo_stream& stream, const GraphKey& key) : stream_(stream) {
    const auto add = [&](int64_t uid, int64_t heads, const AttentionStrides& lie) {
      // Packed sequences follow one another without gaps.
      const int64_t outer = key.ragged ? (key.tokens - 1) * lie.token
                                       : (key.batch - 1) * lie.batch + (key.length - 1) * lie.token;
      fill(uid, outer + (heads - 1) * lie.head + std::max(key.head_dim, key.value_dim), 1, MIMO_DTYPE_BF16);
    };
    add(q_uid, key.query_heads, key.q);
    add(k_uid, key.key_heads, key.k);
    add(v_uid, key.key_heads, key.k);
    add(o_uid, key.query_heads, key.o);
    // A log-sum-exp that keeps probabilities small.
    fill(stats_uid, (key.ragged ? key.tokens : key.batch * key.length) * key.query_heads, 1, MIMO_DTYPE_F32, 10);
    if (!key.backward) return;
    add(do_uid, key.query_heads, key.d_o);
    add(dq_uid, key.query_heads, key.dq);
    add(dk_uid, key.key_heads, key.dk);
    add(dv_uid, key.key_heads, key.dk);
  }
  const std::unordered_map<int64_t, void*>& pointers() const { return pointers_; }

 private:
  void fill(int64_t uid, int64_t elements, double scale, int32_t dtype, double mean = 0) {
    memory_.push_back(std::make_unique<Workspace>(&stream_, elements * (dtype == MIMO_DTYPE_F32 ? 4 : 2)));
    pointers_[uid] = memory_.back()->as<void>();
    fill_normal(stream_, pointers_[uid], elements, scale, dtype, mean);
  }

  mimo_stream& stream_;
  std::vector<std::unique_ptr<Workspace>> memory_;
  std::unordered_map<int64_t, void*> pointers_;
};

/// Equal sequences that cover the tokens of a packed batch, as cumulative lengths on the device.
std::vector<int32_t> equal_parts(const GraphKey& key) {
  std::vector<int32_t> counts(static_cast<size_t>(key.batch + 1));
  const int64_t each = std::min(key.length, key.tokens / key.batch);
  for (int64_t i = 0; i <= key.batch; ++i) counts[static_cast<size_t>(i)] = static_cast<int32_t>(i * each);
  return counts;
}

}  // namespace

void CudnnGraphs::State::time_graph(mimo_stream& stream, const GraphKey& key) {
  const Tensors tensors(stream, key);
  std::unordered_map<int64_t, void*> pointers = tensors.pointers();
  const std::vector<int32_t> counts = key.ragged ? equal_parts(key) : std::vector<int32_t>{};
  Workspace cu_seqlens(&stream, static_cast<int64_t>(counts.size()) * 4);
  check(cudaMemcpyAsync(cu_seqlens.as<void>(), counts.data(), counts.size() * 4, cudaMemcpyHostToDevice, stream.handle()),
        "a copy to the device");
  check(cudaStreamSynchronize(stream.handle()), "a copy to the device");
  const SequenceArrays arrays(stream, cu_seqlens.as<int32_t>(), key.batch, key.tokens, key, pointers);
  std::vector<Candidate> queued;
  std::vector<Graph> taken;
  for (const Graph& graph : candidates(key)) {
    Candidate candidate = [&, graph](int64_t) { execute(stream, graph, pointers); };
    if (!runs(candidate)) continue;
    queued.push_back(std::move(candidate));
    taken.push_back(graph);
  }
  if (queued.empty()) return;
  const Timing timing = time_in_turns(stream, queued);
  const Graph& best = taken[timing.best];
  algorithms.add(text_of(key), text_of_plan(*best.graph, best.plan), timing);
}

CudnnGraphs::CudnnGraphs(Algorithms& algorithms) : state_(std::make_unique<State>(algorithms)) {
  open_vendor(Vendor::cudnn);
  check_cudnn(cudnnCreate(&state_->handle), "its start");
}

CudnnGraphs::~CudnnGraphs() {
  state_->graphs.clear();
  if (state_->handle != nullptr) cudnnDestroy(state_->handle);
}

void CudnnGraphs::forget() { state_->graphs.clear(); }

void CudnnGraphs::execute(mimo_stream& stream, const GraphKey& key, std::unordered_map<int64_t, void*>& pointers) {
  state_->execute(stream, state_->graph(key), pointers);
}

int32_t CudnnGraphs::time_algorithms(mimo_stream& stream) {
  int32_t left_out = 0;
  for (const auto& [key, graph] : state_->graphs) {
    if (!state_->algorithms.wanted(text_of(key))) continue;
    try {
      state_->time_graph(stream, key);
    } catch (const Error& error) {
      if (error.status() != MIMO_ERROR_OUT_OF_MEMORY) throw;
      ++left_out;
    }
  }
  return left_out;
}

std::map<int64_t, int64_t> token_strides(const GraphKey& key) {
  std::map<int64_t, int64_t> strides{{q_uid, key.q.token},
                                     {k_uid, key.k.token},
                                     {v_uid, key.k.token},
                                     {o_uid, key.o.token},
                                     {stats_uid, key.query_heads}};
  if (key.backward) {
    strides.insert({{do_uid, key.d_o.token}, {dq_uid, key.dq.token}, {dk_uid, key.dk.token}, {dv_uid, key.dk.token}});
  }
  return strides;
}

bool gradient_takes_lengths(int64_t length) { return length % 128 != 0 && fe::detail::get_backend_version() <= 91500; }

SequenceArrays::SequenceArrays(mimo_stream& stream, const int32_t* cu_seqlens, int64_t sequences, int64_t tokens,
                               const GraphKey& key, std::unordered_map<int64_t, void*>& pointers)
    : memory_(&stream, !key.lengths  ? 0
                       : !key.ragged ? key.batch * 4
                                     : static_cast<int64_t>(token_strides(key).size() + 1) * (key.batch + 1) * 4) {
  if (!key.lengths) return;
  int32_t* array = memory_.as<int32_t>();
  pointers[length_uid] = array;
  if (cu_seqlens == nullptr) {
    attention_equal_lengths(stream, key.length, key.batch, array);
    return;
  }
  attention_lengths(stream, cu_seqlens, sequences, key.batch, array);
  if (!key.ragged) return;
  for (const auto& [uid, stride] : token_strides(key)) {
    if (tokens * stride > INT32_MAX) {
      throw Error(MIMO_ERROR_UNSUPPORTED, "Packed attention takes at most 2^31 elements a tensor; use shorter packs.");
    }
    array += key.batch + 1;
    attention_offsets(stream, cu_seqlens, sequences, key.batch, stride, array);
    pointers[ragged_uid + uid] = array;
  }
}

}  // namespace mimo::cuda
