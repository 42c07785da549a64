// cuDNN attention graphs, built once for each shape and cached.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>

#include "attention_layout.h"
#include "device.h"

namespace mimo::cuda {

class Algorithms;

/// Tensor identifiers of a graph. The packed-sequence offsets of tensor i, in elements, are tensor ragged_uid + i.
enum Uid : int64_t { q_uid = 1, k_uid, v_uid, o_uid, stats_uid, do_uid, dq_uid, dk_uid, dv_uid, length_uid, ragged_uid = 20 };

/// Everything that a graph depends on.
struct GraphKey {
  /// `lengths`: the graph takes the length of each sequence.
  bool backward, ragged, lengths, causal, deterministic;
  /// `window`: keys that a query sees at most, its own included; 0: all that the mask leaves.
  int64_t batch, query_heads, key_heads, length, head_dim, value_dim, tokens, window;
  AttentionStrides q, k, o, d_o, dq, dk;
  float scale;

  auto tied() const {
    return std::tie(backward, ragged, lengths, causal, deterministic, batch, query_heads, key_heads, length, head_dim, value_dim, tokens, window, q.batch,
                    q.head, q.token, k.batch, k.head, k.token, o.batch, o.head, o.token, d_o.batch, d_o.head, d_o.token,
                    dq.batch, dq.head, dq.token, dk.batch, dk.head, dk.token, scale);
  }
  bool operator<(const GraphKey& other) const { return tied() < other.tied(); }
};

/// Elements between tokens of each tensor of packed sequences.
std::map<int64_t, int64_t> token_strides(const GraphKey& key);

class CudnnGraphs {
 public:
  explicit CudnnGraphs(Algorithms& algorithms);
  ~CudnnGraphs();
  void execute(mimo_stream& stream, const GraphKey& key, std::unordered_map<int64_t, void*>& pointers);
  /// Times all graphs so far that have no choice; returns how many could not be timed for lack of memory.
  int32_t time_algorithms(mimo_stream& stream);
  void forget();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Whether the front end would add lengths to the gradient of equal sequences itself, for cuDNN up to 9.15. It copies them
/// from a temporary array of the host at each call, which a CUDA graph cannot repeat.
bool gradient_takes_lengths(int64_t length);

/// Owns the lengths and offsets of sequences on the device and sets `pointers` to them. cu_seqlens [sequences + 1] is on
/// the device; null: all are of the graph's length.
class SequenceArrays {
 public:
  SequenceArrays(mimo_stream& stream, const int32_t* cu_seqlens, int64_t sequences, int64_t tokens, const GraphKey& key,
               std::unordered_map<int64_t, void*>& pointers);

 private:
  Workspace memory_;
};

}  // namespace mimo::cuda
