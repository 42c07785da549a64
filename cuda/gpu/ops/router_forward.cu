// Router: scores, deterministic top-k selection, routing weights (spec language-model 4.2), and the statistics of the
// balancing loss (4.4).
#include "router.cuh"

namespace mimo::cuda {
namespace {

constexpr int64_t tokens_per_partial = 128;

/// What the statistics need of every token.
struct TokenStatistics {
  uint8_t* selected;     // [T, E] membership of the unbiased, ungrouped top-k; 0 for padding
  float* normalisation;  // [T] 1 / Σ_e s_e; 0 for padding
};

/// A candidate's rank as one number: larger values first, ties in index order; NaN and -infinity last, in index order.
/// 0 is no candidate.
__device__ __forceinline__ uint64_t rank_of(float value, int64_t index) {
  const uint32_t bits = __float_as_uint(value);
  uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  if (value == 0.0f) order = 0x80000000u;  // -0 and 0 tie
  if (!(value > -INFINITY)) order = 0;
  return static_cast<uint64_t>(order) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(index));
}

/// The best candidate of [begin, end) that is not `taken`; every lane gets its index.
__device__ __forceinline__ int best_of(const float* values, const uint8_t* taken, int begin, int end) {
  uint64_t best = 0;
  for (int i = begin + lane_id(); i < end; i += 32) {
    const uint64_t rank = taken[i] != 0 ? 0 : rank_of(values[i], i);
    best = rank > best ? rank : best;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(all_lanes, static_cast<unsigned long long>(best), offset);
    best = other > best ? other : best;
  }
  return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(best));
}

/// Marks the k best of [begin, end) as taken; returns the sum of their values, the largest first.
__device__ __forceinline__ float take_best(const float* values, uint8_t* taken, int begin, int end, int64_t k) {
  float sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    const int chosen = best_of(values, taken, begin, end);
    sum += values[chosen];
    __syncwarp();  // all have looked
    if (lane_id() == 0) taken[chosen] = 1;
    __syncwarp();
  }
  return sum;
}

__device__ __forceinline__ void clear(uint8_t* taken, int count) {
  for (int i = lane_id(); i < count; i += 32) taken[i] = 0;
  __syncwarp();
}

/// Puts -infinity outside the group_topk groups of the highest score (spec 4.2 item 4).
__device__ void limit_groups(const mimo_router_forward_args& args, float* values, uint8_t* taken, float* group_scores) {
  const int groups = static_cast<int>(args.expert_groups), size = static_cast<int>(args.experts) / groups;
  clear(taken, static_cast<int>(args.experts));
  for (int g = 0; g < groups; ++g) {
    const float score = take_best(values, taken, g * size, (g + 1) * size, args.group_score_topk);
    if (lane_id() == 0) group_scores[g] = score;
  }
  clear(taken, static_cast<int>(args.experts));
  take_best(group_scores, taken, 0, groups, args.group_topk);
  for (int e = lane_id(); e < args.experts; e += 32) {
    if (taken[e / size] == 0) values[e] = -INFINITY;
  }
  __syncwarp();
}

/// Shared memory of a warp: values [E], group scores [groups], taken marks [E].
__host__ __device__ constexpr int64_t warp_bytes(int64_t experts, int64_t groups) {
  return round_up(experts * 5 + groups * 4, 16);
}

__global__ void route_kernel(mimo_router_forward_args args, TokenStatistics statistics) {
  extern __shared__ char shared_memory[];
  const int64_t token = token_of_warp();
  if (token >= args.tokens) return;
  const int experts = static_cast<int>(args.experts);
  float* values = reinterpret_cast<float*>(shared_memory + warp_id() * warp_bytes(args.experts, args.expert_groups));
  float* group_scores = values + experts;
  uint8_t* taken = reinterpret_cast<uint8_t*>(group_scores + args.expert_groups);
  const float* logits = args.logits + token * args.experts;
  float* scores = args.scores + token * args.experts;
  const bool sigmoid_scores = args.score_function == MIMO_SCORE_SIGMOID;
  const bool padding = args.padding_mask != nullptr && args.padding_mask[token] != 0;

  float shift = 0, scale = 1;
  if (!sigmoid_scores) {
    shift = max_experts(experts, [&](int64_t e) { return logits[e]; });
    scale = 1.0f / sum_experts(experts, [&](int64_t e) { return expf(logits[e] - shift); });
  }
  // Softmax keeps the order of the logits and loses some of their differences, so the logits themselves decide.
  float score_sum = 0;
  for (int e = lane_id(); e < experts; e += 32) {
    const float logit = logits[e];
    const float score = sigmoid_scores ? sigmoid(logit) : expf(logit - shift) * scale;
    scores[e] = score;
    score_sum += score;
    values[e] = (sigmoid_scores ? score : logit) + (args.expert_bias != nullptr ? args.expert_bias[e] : 0.0f);
  }
  score_sum = warp_sum(score_sum);
  __syncwarp();
  if (args.expert_groups > 1) limit_groups(args, values, taken, group_scores);
  clear(taken, experts);
  take_best(values, taken, 0, experts, args.topk);

  // The chosen experts in ascending order, and their weights.
  const bool over_selected = !sigmoid_scores && args.pre_softmax == 0;
  float largest = -INFINITY, sum = 0;
  for (int e = lane_id(); e < experts; e += 32) {
    if (taken[e] != 0) largest = fmaxf(largest, logits[e]);
  }
  largest = warp_max(largest);
  for (int e = lane_id(); e < experts; e += 32) {
    if (taken[e] != 0) sum += over_selected ? expf(logits[e] - largest) : scores[e];
  }
  sum = warp_sum(sum);
  float factor = args.scaling_factor;
  if (over_selected) {
    factor /= sum;
  } else if (sigmoid_scores && args.topk > 1) {
    factor /= sum + 1e-20f;
  }
  int64_t place = token * args.topk;
  for (int first = 0; first < experts; first += 32) {
    const int e = first + lane_id();
    const bool chosen = e < experts && taken[e] != 0;
    const unsigned ballot = __ballot_sync(all_lanes, chosen);
    if (chosen) {
      const int64_t at = place + __popc(ballot & ((1u << lane_id()) - 1u));
      args.expert_index[at] = e;
      args.probabilities[at] = factor * (over_selected ? expf(logits[e] - largest) : scores[e]);
      if (args.tokens_per_expert != nullptr && !padding) atomicAdd(&args.tokens_per_expert[e], 1);
    }
    place += __popc(ballot);
  }

  if (statistics.selected == nullptr) return;
  if (!padding && (args.expert_bias != nullptr || args.expert_groups > 1)) {
    __syncwarp();
    for (int e = lane_id(); e < experts; e += 32) values[e] = sigmoid_scores ? scores[e] : logits[e];
    clear(taken, experts);
    take_best(values, taken, 0, experts, args.topk);
  }
  for (int e = lane_id(); e < experts; e += 32) {
    statistics.selected[token * args.experts + e] = padding ? 0 : taken[e];
  }
  if (lane_id() == 0) {
    statistics.normalisation[token] = padding ? 0.0f : (sigmoid_scores ? 1.0f / (score_sum + 1e-20f) : 1.0f);
  }
}

/// Of one piece of a sequence: Σ of normalised scores and how many tokens hold an expert, [pieces, E] each, and the
/// tokens that are not padding, [pieces].
struct Partials {
  double* sums;
  int32_t* counts;
  int32_t* tokens;
};

__global__ void piece_statistics_kernel(mimo_router_forward_args args, TokenStatistics of, Partials partials) {
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, tokens_per_partial, blockIdx.x);
  const int64_t e = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (e >= args.experts || piece.count == 0) return;
  double sum = 0;
  int32_t count = 0, tokens = 0;
#pragma unroll 4
  for (int64_t t = piece.begin; t < piece.begin + piece.count; ++t) {
    const float normalisation = of.normalisation[t];
    sum += static_cast<double>(args.scores[t * args.experts + e] * normalisation);
    count += of.selected[t * args.experts + e];
    tokens += args.padding_mask != nullptr && args.padding_mask[t] != 0 ? 0 : 1;
  }
  partials.sums[blockIdx.x * args.experts + e] = sum;
  partials.counts[blockIdx.x * args.experts + e] = count;
  if (e == 0) partials.tokens[blockIdx.x] = tokens;
}

__global__ void sequence_statistics_kernel(mimo_router_forward_args args, Partials partials) {
  const int64_t q = blockIdx.x, e = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (e >= args.experts) return;
  const int64_t first = first_piece(args.cu_seqlens, q, tokens_per_partial);
  const int64_t pieces = ceil_div(args.cu_seqlens[q + 1] - args.cu_seqlens[q], tokens_per_partial);
  double sum = 0;
  int64_t count = 0, tokens = 0;
#pragma unroll 4
  for (int64_t p = first; p < first + pieces; ++p) {
    sum += partials.sums[p * args.experts + e];
    count += partials.counts[p * args.experts + e];
    tokens += partials.tokens[p];
  }
  args.sequence_counts[q * args.experts + e] = static_cast<float>(count);
  args.sequence_score_sums[q * args.experts + e] = static_cast<float>(sum);
  if (e == 0) args.sequence_tokens[q] = static_cast<float>(tokens);
}

}  // namespace

void router_forward(mimo_stream& stream, const mimo_router_forward_args& args) {
  MIMO_REQUIRE(args.topk >= 1 && args.topk <= args.experts, "router_forward");
  MIMO_REQUIRE(args.score_function == MIMO_SCORE_SIGMOID || args.score_function == MIMO_SCORE_SOFTMAX,
               "router_forward");
  MIMO_REQUIRE(args.expert_bias == nullptr || args.score_function == MIMO_SCORE_SIGMOID, "router_forward");
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
  const int64_t shared_bytes = router_warps * warp_bytes(args.experts, args.expert_groups);
  if (shared_bytes > stream.device->shared_bytes_per_block) {
    fail(MIMO_ERROR_UNSUPPORTED, "This GPU's shared memory is too small to route to so many experts.");
  }

  const int64_t pieces = statistics ? piece_count(args.tokens, args.sequences, tokens_per_partial) : 0;
  Workspace selected(&stream, statistics ? args.tokens * args.experts : 0);
  Workspace normalisation(&stream, statistics ? args.tokens * 4 : 0);
  Workspace sums(&stream, pieces * args.experts * 8);
  Workspace counts(&stream, pieces * (args.experts + 1) * 4);
  const TokenStatistics of{statistics ? selected.as<uint8_t>() : nullptr, normalisation.as<float>()};
  launch(stream, route_kernel, router_grid(args.tokens), dim3(32 * router_warps), shared_bytes, args, of);
  if (!statistics) return;
  const Partials partials{sums.as<double>(), counts.as<int32_t>(), counts.as<int32_t>() + pieces * args.experts};
  const dim3 block(128);
  const int64_t columns = ceil_div(args.experts, 128);
  launch(stream, piece_statistics_kernel, grid_of(pieces, columns), block, 0, args, of, partials);
  launch(stream, sequence_statistics_kernel, grid_of(args.sequences, columns), block, 0, args, partials);
}

}  // namespace mimo::cuda
