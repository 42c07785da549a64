// Hierarchical expert exchange (docs/spec/moe-performance.md §2.3): the nodes that a token is sent to, and the experts
// of a token on the node that received it.
#include "early.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256;

/// One thread a token: it loops over the token's topk choices and the nodes found so far.
__global__ void __launch_bounds__(threads) token_nodes_kernel(mimo_moe_token_nodes_args args) {
  previous_is_done();
  let_next_start();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (token >= args.tokens) return;
  const int topk = static_cast<int>(args.topk), slots = static_cast<int>(args.node_slots);
  const int node_experts = static_cast<int>(args.node_experts), experts = static_cast<int>(args.nodes) * node_experts;
  int32_t* const nodes = args.node_index + token * slots;
  float* const routing = args.routing + token * 2 * topk;
  int found = 0;
  for (int k = 0; k < topk; ++k) {
    const int32_t expert = args.expert_index[token * topk + k];
    const bool kept = expert >= 0 && expert < experts;
    routing[k] = kept ? static_cast<float>(expert) : -1.0f;
    routing[topk + k] = args.probabilities[token * topk + k];
    if (!kept) continue;
    const int32_t node = expert / node_experts;
    bool known = false;
    for (int i = 0; i < found; ++i) known |= nodes[i] == node;
    if (!known) nodes[found++] = node;
  }
  while (found < slots) nodes[found++] = -1;
}

/// One thread for each choice.
__global__ void __launch_bounds__(threads) node_experts_kernel(mimo_moe_node_experts_args args) {
  previous_is_done();
  let_next_start();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (at >= args.rows * args.topk) return;
  const int64_t row = at / args.topk, k = at % args.topk;
  int32_t expert = -1;
  float probability = 0;
  if (row < live_rows(args.rows, args.row_count)) {
    const float* const routing = args.routing + row * 2 * args.topk;
    const int64_t local = static_cast<int64_t>(routing[k]) - args.first_expert;
    if (local >= 0 && local < args.experts) {
      expert = static_cast<int32_t>(local);
      probability = routing[args.topk + k];
    }
  }
  args.expert_index[at] = expert;
  args.probabilities[at] = probability;
}

}  // namespace

void moe_token_nodes(mimo_stream& stream, const mimo_moe_token_nodes_args& args) {
  MIMO_REQUIRE(args.nodes > 0 && args.node_experts > 0, "moe_token_nodes");
  MIMO_REQUIRE(args.node_slots >= (args.topk < args.nodes ? args.topk : args.nodes), "moe_token_nodes");
  MIMO_REQUIRE(args.nodes * args.node_experts <= 1 << 24, "moe_token_nodes");  // expert numbers are exact in fp32
  if (args.tokens == 0) return;
  launch_early(stream, token_nodes_kernel, grid_of(ceil_div(args.tokens, threads)), dim3(threads), 0, args);
}

void moe_node_experts(mimo_stream& stream, const mimo_moe_node_experts_args& args) {
  if (args.rows * args.topk == 0) return;
  launch_early(stream, node_experts_kernel, grid_of(ceil_div(args.rows * args.topk, threads)), dim3(threads), 0, args);
}

}  // namespace mimo::cuda
