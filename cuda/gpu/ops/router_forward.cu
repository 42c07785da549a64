// Router: scores [T, E], deterministic top-k, routing weights (docs/spec/language-model.md §4.2) and the statistics of
// the balancing loss (§4.4).
#include "early.cuh"
#include "router_arguments.h"
#include "router_keys.cuh"

namespace mimo::cuda {
namespace {

constexpr int64_t tokens_per_partial = 128;

/// Group-limited top-k: ranks candidates outside the group_topk best groups last (docs/spec/language-model.md §4.2 item
/// 4). A group's score is the sum of its group_score_topk best values; with softmax before top-k, of their
/// probabilities up to the common divisor, which does not change the order. `shift`: the token's largest logit.
template <int Own>
__device__ void limit_groups(const mimo_router_forward_args& args, double shift, Key64 (&key)[Own]) {
  const bool probabilities = args.score_function == MIMO_SCORE_SOFTMAX && args.pre_softmax != 0;
  const int groups = static_cast<int>(args.expert_groups), size = static_cast<int>(args.experts) / groups;
  const int first = lane_id() * Own;
  Key64 group_key[Own] = {};  // lanes own groups as they own experts
  for (int g = 0; g < groups; ++g) {
    Key64 of_group[Own];
#pragma unroll
    for (int j = 0; j < Own; ++j) of_group[j] = (first + j) / size == g ? key[j] : 0;
    double score = 0;
    take_best(of_group, args.group_score_topk, [&](Key64 best) {
      score += probabilities ? exp(value_of(best) - shift) : value_of(best);
    });
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

/// Whether every lane's experts exist and rows are aligned to 16 bytes.
template <int Own>
__device__ __forceinline__ bool whole_packs(const mimo_router_forward_args& args) {
  return Own % 4 == 0 && args.experts == 32 * Own &&
         ((reinterpret_cast<uintptr_t>(args.logits) | reinterpret_cast<uintptr_t>(args.scores)) & 15) == 0;
}

/// One warp a token; each lane holds `Own` consecutive experts in registers.
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
  // Experts are compared by logits: scores have the same order but lose small differences.
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
      if (sigmoid_scores && args.logit_offsets == nullptr) value = 1.0 / (1.0 + exp(-value));
      const float* const added = args.expert_bias != nullptr ? args.expert_bias : args.logit_offsets;
      if (added != nullptr && first + j < experts) value += static_cast<double>(added[first + j]);
      key[j] = first + j < experts ? key_of(value) : 0;
    }
    if (args.expert_groups > 1) limit_groups(args, static_cast<double>(shift), key);
    taken = take_best(key, args.topk);
  }

  // The chosen experts in ascending order with their weights: from all experts' scores, or softmax over the chosen.
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
  int place = 0;  // number of chosen experts in lower lanes
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

/// Calls body(std::integral_constant) with the number of experts that a lane owns.
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

constexpr int count_threads = 1024;

/// tokens_per_expert += each expert's slots, without padding. A separate kernel, because a block sums many slots before
/// it adds to memory: one addition for each token took 14 µs for contention.
__global__ void __launch_bounds__(count_threads) count_tokens_kernel(mimo_router_forward_args args) {
  extern __shared__ int32_t shared_counts[];
  const int experts = static_cast<int>(args.experts);
  for (int e = threadIdx.x; e < experts; e += count_threads) shared_counts[e] = 0;
  __syncthreads();
  previous_is_done();
  let_next_start();
  const int64_t step = static_cast<int64_t>(gridDim.x) * count_threads;
#pragma unroll 4
  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * count_threads + threadIdx.x; slot < args.tokens * args.topk;
       slot += step) {
    if (args.padding_mask != nullptr && args.padding_mask[slot / args.topk] != 0) continue;
    atomicAdd(&shared_counts[args.expert_index[slot]], 1);  // integer atomics: the order does not matter
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += count_threads) {
    if (shared_counts[e] != 0) atomicAdd(&args.tokens_per_expert[e], shared_counts[e]);
  }
}

/// Statistics of a piece of a sequence: [pieces, E] sums of normalised scores and counts of tokens that hold an expert,
/// and [pieces] tokens that are not padding.
struct Partials {
  double* sums;
  int32_t* counts;
  int32_t* tokens;
};

// Threads of both kernels: 32 experts x 32 shares of the values to add.
constexpr int shares = 32;

/// Sums over the block's shares in their order; every thread gets the sum of its column.
template <class T>
__device__ __forceinline__ T sum_shares(T value) {
  __shared__ T shared[shares][33];
  shared[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
  const T sum = warp_sum(shared[threadIdx.x][threadIdx.y]);
  __syncthreads();
  return sum;
}

__global__ void __launch_bounds__(32 * shares)
    piece_statistics_kernel(mimo_router_forward_args args, TokenStatistics of, Partials partials) {
  previous_is_done();
  let_next_start();
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, tokens_per_partial, blockIdx.x);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * 32, e = first + threadIdx.x;
  if (piece.count == 0) return;
  double sum = 0;
  int32_t count = 0, tokens = 0;
#pragma unroll
  for (int i = 0; i < tokens_per_partial; i += shares) {
    if (i + threadIdx.y >= piece.count) continue;
    const int64_t t = piece.begin + i + threadIdx.y;
    tokens += args.padding_mask != nullptr && args.padding_mask[t] != 0 ? 0 : 1;
    if (e >= args.experts) continue;
    sum += static_cast<double>(args.scores[t * args.experts + e] * of.normalisation[t]);
    count += of.selected[t * args.experts + e];
  }
  // From here on a warp holds the shares of one expert.
  sum = sum_shares(sum);
  const int2 counted = make_int2(sum_shares(count), sum_shares(tokens));
  const int64_t own = first + threadIdx.y;
  if (threadIdx.x != 0 || own >= args.experts) return;
  partials.sums[blockIdx.x * args.experts + own] = sum;
  partials.counts[blockIdx.x * args.experts + own] = counted.x;
  if (own == 0) partials.tokens[blockIdx.x] = counted.y;
}

__global__ void __launch_bounds__(32 * shares) sequence_statistics_kernel(mimo_router_forward_args args, Partials partials) {
  previous_is_done();
  let_next_start();
  const int64_t q = blockIdx.x, first_expert = static_cast<int64_t>(blockIdx.y) * 32, e = first_expert + threadIdx.x;
  const int64_t first = first_piece(args.cu_seqlens, q, tokens_per_partial);
  const int64_t pieces = ceil_div(args.cu_seqlens[q + 1] - args.cu_seqlens[q], tokens_per_partial);
  double sum = 0;
  int32_t count = 0, tokens = 0;
  if (e < args.experts) {
#pragma unroll 4
    for (int64_t p = first + threadIdx.y; p < first + pieces; p += shares) {
      sum += partials.sums[p * args.experts + e];
      count += partials.counts[p * args.experts + e];
      tokens += partials.tokens[p];
    }
  }
  sum = sum_shares(sum);
  const int2 counted = make_int2(sum_shares(count), sum_shares(tokens));
  const int64_t own = first_expert + threadIdx.y;
  if (threadIdx.x != 0 || own >= args.experts) return;
  args.sequence_counts[q * args.experts + own] = static_cast<float>(counted.x);
  args.sequence_score_sums[q * args.experts + own] = static_cast<float>(sum);
  if (own == 0) args.sequence_tokens[q] = static_cast<float>(counted.y);
}

}  // namespace

void router_forward(mimo_stream& stream, const mimo_router_forward_args& args) {
  require_valid(args);
  const bool statistics = args.sequence_counts != nullptr;
  const int64_t pieces = statistics ? piece_count(args.tokens, args.sequences, tokens_per_partial) : 0;
  Workspace selected(&stream, statistics ? args.tokens * args.experts : 0);
  Workspace normalisation(&stream, statistics ? args.tokens * 4 : 0);
  Workspace sums(&stream, pieces * args.experts * 8);
  Workspace counts(&stream, pieces * (args.experts + 1) * 4);
  const TokenStatistics of{statistics ? selected.as<uint8_t>() : nullptr, normalisation.as<float>()};
  if (!route_several(stream, args, of)) {
    with_own(args.experts, [&](auto own) {
      const auto run = [&](auto kernel) {
        launch_early(stream, kernel, router_grid(args.tokens), dim3(32 * router_warps), 0, args, of);
      };
      const bool wide = args.expert_bias != nullptr || args.logit_offsets != nullptr || args.expert_groups > 1;
      wide ? run(route_kernel<own, Key64>) : run(route_kernel<own, Key32>);
    });
  }
  if (args.tokens_per_expert != nullptr) {
    const int64_t blocks = smaller(16, ceil_div(args.tokens * args.topk, count_threads));
    launch_early(stream, count_tokens_kernel, grid_of(blocks), dim3(count_threads), args.experts * 4, args);
  }
  if (!statistics) return;
  const Partials partials{sums.as<double>(), counts.as<int32_t>(), counts.as<int32_t>() + pieces * args.experts};
  const dim3 block(32, shares);
  const int64_t columns = ceil_div(args.experts, 32);
  launch_early(stream, piece_statistics_kernel, grid_of(pieces, columns), block, 0, args, of, partials);
  launch_early(stream, sequence_statistics_kernel, grid_of(args.sequences, columns), block, 0, args, partials);
}

}  // namespace mimo::cuda
