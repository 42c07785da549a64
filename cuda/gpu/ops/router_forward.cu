// Router: scores, deterministic top-k selection, routing weights (spec language-model 4.2), and the statistics of the
// balancing loss (4.4).
#include "early.cuh"
#include "router.cuh"

namespace mimo::cuda {
namespace {

constexpr int64_t tokens_per_partial = 128;

/// What the statistics need of every token.
struct TokenStatistics {
  uint8_t* selected;     // [T, E] membership of the unbiased, ungrouped top-k; 0 for padding
  float* normalisation;  // [T] 1 / Σ_e s_e; 0 for padding
};

// Keys order the candidates of a selection: larger values first, -0 with 0; NaN and -infinity last. 0 is no candidate. What
// has a bias or groups is compared in fp64, as in the CPU library: two scores around 0.5 are often closer than fp32 can tell.
using Key32 = uint32_t;
using Key64 = unsigned long long;
constexpr int last_key = 1;

__device__ __forceinline__ Key32 key_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
  return value > -INFINITY ? bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u) : last_key;
}
__device__ __forceinline__ Key64 key_of(double value) {
  const Key64 bits = static_cast<Key64>(__double_as_longlong(value + 0.0));
  const Key64 flip = static_cast<Key64>(static_cast<long long>(bits) >> 63) | 1ull << 63;
  return value > -INFINITY ? bits ^ flip : last_key;
}
__device__ __forceinline__ float value_of(Key32 key) {
  return key <= last_key ? -INFINITY : __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}
__device__ __forceinline__ double value_of(Key64 key) {
  if (key <= last_key) return -INFINITY;
  return __longlong_as_double(static_cast<long long>((key >> 63) != 0 ? key ^ 1ull << 63 : ~key));
}

__device__ __forceinline__ Key32 largest_of_warp(Key32 key) { return __reduce_max_sync(all_lanes, key); }
__device__ __forceinline__ Key64 largest_of_warp(Key64 key) {
  const uint32_t upper = static_cast<uint32_t>(key >> 32), most = __reduce_max_sync(all_lanes, upper);
  const uint32_t lower = __reduce_max_sync(all_lanes, upper == most ? static_cast<uint32_t>(key) : 0u);
  return static_cast<Key64>(most) << 32 | lower;
}

/// Marks this lane's own among the warp's k best keys: bit j for key[j]. Lanes own consecutive candidates, and ties go to
/// the first. Calls take(key) for each of the k, the largest first.
template <int Own, class Key, class Take>
__device__ __forceinline__ unsigned take_best(const Key (&key)[Own], int64_t k, Take&& take) {
  Key sorted[Own];  // falling, so that the lane's next candidate is always the first
#pragma unroll
  for (int j = 0; j < Own; ++j) sorted[j] = key[j];
#pragma unroll
  for (int last = Own - 1; last > 0; --last) {
#pragma unroll
    for (int j = 0; j < last; ++j) {
      const Key first = max(sorted[j], sorted[j + 1]);
      sorted[j + 1] = min(sorted[j], sorted[j + 1]);
      sorted[j] = first;
    }
  }
  const unsigned lower_lanes = (1u << lane_id()) - 1u;
  int count = 0;       // how many of this lane's are taken,
  Key least = ~Key{0};  // and the smallest of them; no key is so large
  for (int64_t i = 0; i < k; ++i) {
    const Key best = largest_of_warp(sorted[0]);
    const bool holds = sorted[0] == best;
    if ((__ballot_sync(all_lanes, holds) & lower_lanes) == 0 && holds) {
      ++count;
      least = best;
#pragma unroll
      for (int j = 0; j + 1 < Own; ++j) sorted[j] = sorted[j + 1];
      sorted[Own - 1] = 0;
    }
    take(best);
  }
  unsigned taken = 0;
#pragma unroll
  for (int j = 0; j < Own; ++j) taken |= (key[j] >= least ? 1u : 0u) << j;
  if (__popc(taken) == count) return taken;
  // Of several that equal the smallest, the first ones.
  int spare = __popc(taken) - count;
#pragma unroll
  for (int j = Own - 1; j >= 0; --j) {
    if (spare > 0 && key[j] == least) taken &= ~(1u << j), --spare;
  }
  return taken;
}
template <int Own, class Key>
__device__ __forceinline__ unsigned take_best(const Key (&key)[Own], int64_t k) {
  return take_best(key, k, [](Key) {});
}

/// Leaves the candidates outside the group_topk groups of the highest score for last (spec 4.2 item 4). A group's score is
/// the sum of its group_score_topk best.
template <int Own>
__device__ void limit_groups(const mimo_router_forward_args& args, Key64 (&key)[Own]) {
  const int groups = static_cast<int>(args.expert_groups), size = static_cast<int>(args.experts) / groups;
  const int first = lane_id() * Own;
  Key64 group_key[Own] = {};  // lanes own groups as they own experts
  for (int g = 0; g < groups; ++g) {
    Key64 of_group[Own];
#pragma unroll
    for (int j = 0; j < Own; ++j) of_group[j] = (first + j) / size == g ? key[j] : 0;
    double score = 0;
    take_best(of_group, args.group_score_topk, [&](Key64 best) { score += value_of(best); });
#pragma unroll
    for (int j = 0; j < Own; ++j) {
      if (first + j == g) group_key[j] = key_of(score);
    }
  }
  const unsigned chosen = take_best(group_key, args.group_topk);
#pragma unroll
  for (int j = 0; j < Own; ++j) {
    const int group = (first + j) / size;
    const unsigned of_owner = __shfl_sync(all_lanes, chosen, group / Own % 32);
    if ((of_owner >> group % Own & 1u) == 0 && key[j] != 0) key[j] = last_key;
  }
}

/// All lanes own experts that exist, and their rows begin at 16 bytes.
template <int Own>
__device__ __forceinline__ bool whole_packs(const mimo_router_forward_args& args) {
  return Own % 4 == 0 && args.experts == 32 * Own &&
         ((reinterpret_cast<uintptr_t>(args.logits) | reinterpret_cast<uintptr_t>(args.scores)) & 15) == 0;
}

/// A warp routes a token; its lanes own `Own` consecutive experts each, in registers.
template <int Own, class Key>
__global__ void __launch_bounds__(32 * router_warps, Own <= 4 && sizeof(Key) == sizeof(Key32) ? 8 : 1)
    route_kernel(mimo_router_forward_args args, TokenStatistics statistics) {
  previous_is_done();
  let_next_start();
  const int64_t token = token_of_warp();
  if (token >= args.tokens) return;
  const int experts = static_cast<int>(args.experts), first = lane_id() * Own;
  const float* const logits = args.logits + token * args.experts;
  float* const scores = args.scores + token * args.experts;
  const bool sigmoid_scores = args.score_function == MIMO_SCORE_SIGMOID;
  const bool padding = args.padding_mask != nullptr && args.padding_mask[token] != 0;
  float logit[Own], score[Own];
  if (whole_packs<Own>(args)) {
    read(logits + first, logit);
  } else {
#pragma unroll
    for (int j = 0; j < Own; ++j) logit[j] = first + j < experts ? logits[first + j] : -INFINITY;
  }
  // Scores keep the order of the logits and lose some of their differences, so the logits themselves decide.
  Key32 order[Own];
#pragma unroll
  for (int j = 0; j < Own; ++j) order[j] = first + j < experts ? key_of(logit[j]) : 0;

  float shift = 0, score_sum = 0;
  if (sigmoid_scores) {
#pragma unroll
    for (int j = 0; j < Own; ++j) score[j] = __fdividef(1.0f, 1.0f + expf(-logit[j]));
  } else {
    Key32 largest = order[0];
#pragma unroll
    for (int j = 1; j < Own; ++j) largest = order[j] > largest ? order[j] : largest;
    shift = value_of(largest_of_warp(largest));
#pragma unroll
    for (int j = 0; j < Own; ++j) score[j] = expf(logit[j] - shift);
  }
  if (!sigmoid_scores || statistics.selected != nullptr) {
#pragma unroll
    for (int j = 0; j < Own; ++j) score_sum += first + j < experts ? score[j] : 0.0f;
    score_sum = warp_sum(score_sum);
  }
  const float scale = sigmoid_scores ? 1.0f : __fdividef(1.0f, score_sum);
  float scaled[Own];
#pragma unroll
  for (int j = 0; j < Own; ++j) scaled[j] = score[j] * scale;
  if (whole_packs<Own>(args)) {
    write(scores + first, scaled);
  } else {
#pragma unroll
    for (int j = 0; j < Own; ++j) {
      if (first + j < experts) scores[first + j] = scaled[j];
    }
  }

  unsigned taken;
  if constexpr (sizeof(Key) == sizeof(Key32)) {
    taken = take_best(order, args.topk);
  } else {
    Key64 key[Own];
#pragma unroll
    for (int j = 0; j < Own; ++j) {
      double value = static_cast<double>(logit[j]);
      if (sigmoid_scores) value = 1.0 / (1.0 + exp(-value));
      if (args.expert_bias != nullptr && first + j < experts) value += static_cast<double>(args.expert_bias[first + j]);
      key[j] = first + j < experts ? key_of(value) : 0;
    }
    if (args.expert_groups > 1) limit_groups(args, key);
    taken = take_best(key, args.topk);
  }

  // The chosen experts in ascending order, and their weights: of all experts' scores, or softmax over the chosen ones.
  float weight[Own];
#pragma unroll
  for (int j = 0; j < Own; ++j) weight[j] = scaled[j];
  const bool over_selected = !sigmoid_scores && args.pre_softmax == 0;
  if (over_selected) {
    float largest = shift;
    if (args.expert_groups > 1) {
      largest = -INFINITY;
#pragma unroll
      for (int j = 0; j < Own; ++j) largest = (taken >> j & 1u) != 0 ? fmaxf(largest, logit[j]) : largest;
      largest = warp_max(largest);
    }
#pragma unroll
    for (int j = 0; j < Own; ++j) weight[j] = largest == shift ? score[j] : expf(logit[j] - largest);
  }
  float factor = args.scaling_factor;
  if (over_selected || (sigmoid_scores && args.topk > 1)) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < Own; ++j) sum += (taken >> j & 1u) != 0 ? weight[j] : 0.0f;
    sum = warp_sum(sum);
    factor = __fdividef(factor, over_selected ? sum : sum + 1e-20f);
  }
  int place = 0;  // chosen experts of lower lanes
#pragma unroll
  for (int j = 0; j < Own; ++j) {
    place += __popc(__ballot_sync(all_lanes, taken >> j & 1u) & ((1u << lane_id()) - 1u));
  }
  int32_t* const index = args.expert_index + token * args.topk;
  float* const probabilities = args.probabilities + token * args.topk;
#pragma unroll
  for (int j = 0; j < Own; ++j) {
    if ((taken >> j & 1u) == 0) continue;
    index[place] = first + j;
    probabilities[place] = factor * weight[j];
    ++place;
    if (args.tokens_per_expert != nullptr && !padding) atomicAdd(&args.tokens_per_expert[first + j], 1);
  }

  if (statistics.selected == nullptr) return;
  if (sizeof(Key) == sizeof(Key64)) taken = take_best(order, args.topk);
#pragma unroll
  for (int j = 0; j < Own; ++j) {
    if (first + j < experts) statistics.selected[token * args.experts + first + j] = padding ? 0 : taken >> j & 1u;
  }
  if (lane_id() == 0) {
    statistics.normalisation[token] = padding ? 0.0f : (sigmoid_scores ? 1.0f / (score_sum + 1e-20f) : 1.0f);
  }
}

/// Calls body(std::integral_constant) with the experts that a lane owns.
template <class Body>
void with_own(int64_t experts, Body&& body) {
  const auto own = [&](auto count) {
    if (experts > 32 * count) return false;
    body(count);
    return true;
  };
  if (own(std::integral_constant<int, 1>{}) || own(std::integral_constant<int, 2>{}) ||
      own(std::integral_constant<int, 4>{}) || own(std::integral_constant<int, 8>{}) ||
      own(std::integral_constant<int, 16>{}) || own(std::integral_constant<int, 32>{})) {
    return;
  }
  fail(MIMO_ERROR_UNSUPPORTED, "The CUDA library routes to 1024 experts at most.");
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
  const int64_t pieces = statistics ? piece_count(args.tokens, args.sequences, tokens_per_partial) : 0;
  Workspace selected(&stream, statistics ? args.tokens * args.experts : 0);
  Workspace normalisation(&stream, statistics ? args.tokens * 4 : 0);
  Workspace sums(&stream, pieces * args.experts * 8);
  Workspace counts(&stream, pieces * (args.experts + 1) * 4);
  const TokenStatistics of{statistics ? selected.as<uint8_t>() : nullptr, normalisation.as<float>()};
  with_own(args.experts, [&](auto own) {
    const auto run = [&](auto kernel) {
      launch_early(stream, kernel, router_grid(args.tokens), dim3(32 * router_warps), 0, args, of);
    };
    args.expert_bias != nullptr || args.expert_groups > 1 ? run(route_kernel<own, Key64>) : run(route_kernel<own, Key32>);
  });
  if (!statistics) return;
  const Partials partials{sums.as<double>(), counts.as<int32_t>(), counts.as<int32_t>() + pieces * args.experts};
  const dim3 block(128);
  const int64_t columns = ceil_div(args.experts, 128);
  launch(stream, piece_statistics_kernel, grid_of(pieces, columns), block, 0, args, of, partials);
  launch(stream, sequence_statistics_kernel, grid_of(args.sequences, columns), block, 0, args, partials);
}

}  // namespace mimo::cuda
