#include "router_arguments.h"

#include "require.h"

namespace mimo {

void require_valid(const mimo_router_forward_args& args) {
  MIMO_REQUIRE(args.topk >= 1 && args.topk <= args.experts, "router_forward");
  MIMO_REQUIRE(args.score_function == MIMO_SCORE_SIGMOID || args.score_function == MIMO_SCORE_SOFTMAX,
               "router_forward");
  MIMO_REQUIRE(args.expert_bias == nullptr || args.score_function == MIMO_SCORE_SIGMOID, "router_forward");
  MIMO_REQUIRE(args.logit_offsets == nullptr ||
                   (args.expert_bias == nullptr && args.expert_groups == 1 &&
                    (args.score_function == MIMO_SCORE_SIGMOID || args.pre_softmax != 0)),
               "router_forward");
  MIMO_REQUIRE(args.expert_groups >= 1 && args.experts % args.expert_groups == 0, "router_forward");
  if (args.expert_groups > 1) {
    const int64_t size = args.experts / args.expert_groups;
    MIMO_REQUIRE(args.group_topk >= 1 && args.group_topk <= args.expert_groups, "router_forward");
    MIMO_REQUIRE(args.topk <= args.group_topk * size, "router_forward");
    MIMO_REQUIRE(args.group_score_topk >= 1 && args.group_score_topk <= size, "router_forward");
  }
  const bool statistics = args.sequence_counts != nullptr;
  MIMO_REQUIRE(statistics == (args.sequence_score_sums != nullptr) && statistics == (args.sequence_tokens != nullptr),
               "router_forward");
}

}  // namespace mimo
