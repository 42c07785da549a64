// Hierarchical expert exchange (docs/spec/moe-performance.md §2.3): the nodes that a token is sent to, and the experts
// of a token on the node that received it.
#include "kernel.h"

namespace mimo::MIMO_ISA {

void moe_token_nodes(mimo_stream& stream, const mimo_moe_token_nodes_args& args) {
  const int64_t topk = args.topk, slots = args.node_slots, experts = args.nodes * args.node_experts;
  MIMO_REQUIRE(args.nodes > 0 && args.node_experts > 0, "moe_token_nodes");
  MIMO_REQUIRE(slots >= (topk < args.nodes ? topk : args.nodes), "moe_token_nodes");
  MIMO_REQUIRE(experts <= 1 << 24, "moe_token_nodes");  // expert numbers are exact in fp32
  parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      int32_t* const nodes = args.node_index + token * slots;
      float* const routing = args.routing + token * 2 * topk;
      int64_t found = 0;
      for (int64_t k = 0; k < topk; ++k) {
        const int32_t expert = args.expert_index[token * topk + k];
        const bool kept = expert >= 0 && expert < experts;
        routing[k] = kept ? static_cast<float>(expert) : -1.0f;
        routing[topk + k] = args.probabilities[token * topk + k];
        if (!kept) continue;
        const int32_t node = static_cast<int32_t>(expert / args.node_experts);
        bool known = false;
        for (int64_t i = 0; i < found; ++i) known |= nodes[i] == node;
        if (!known) nodes[found++] = node;
      }
      while (found < slots) nodes[found++] = -1;
    }
  });
}

void moe_node_experts(mimo_stream& stream, const mimo_moe_node_experts_args& args) {
  const int64_t topk = args.topk, live = live_rows(args.rows, args.row_count);
  parallel_range(stream.device->threads, args.rows, rows_per_partial, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t k = 0; k < topk; ++k) {
        const int64_t at = row * topk + k;
        args.expert_index[at] = -1;
        args.probabilities[at] = 0;
        if (row >= live) continue;
        const int64_t expert = static_cast<int64_t>(args.routing[row * 2 * topk + k]) - args.first_expert;
        if (expert < 0 || expert >= args.experts) continue;
        args.expert_index[at] = static_cast<int32_t>(expert);
        args.probabilities[at] = args.routing[row * 2 * topk + topk + k];
      }
    }
  });
}

}  // namespace mimo::MIMO_ISA
