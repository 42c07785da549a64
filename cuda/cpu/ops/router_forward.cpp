// Router: scores [T, E], deterministic top-k, routing weights (docs/spec/language-model.md §4.2) and the statistics of
// the balancing loss (§4.4).
#include "router.h"
#include "router_arguments.h"

namespace mimo::MIMO_ISA {
namespace {

bool contains(const int32_t* indices, int64_t count, int64_t index) {
  for (int64_t i = 0; i < count; ++i)
    if (indices[i] == index) return true;
  return false;
}

/// The k largest of n >= k values, largest first, ties in index order. NaN and -infinity come last in index order, so
/// there are always k distinct indices.
template <class T>
void select_largest(const T* values, int64_t n, int64_t k, T* best, int32_t* chosen) {
  constexpr int64_t block = 16;
  int64_t count = 0;
  T threshold = -INFINITY;  // smallest of the values chosen so far
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = begin + block < n ? begin + block : n;
    int32_t any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = begin; i < end; ++i) any |= values[i] > threshold ? 1 : 0;
    if (any == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      const T value = values[i];
      if (!(value > threshold)) continue;
      int64_t at = count < k ? count++ : k - 1;
      for (; at > 0 && best[at - 1] < value; --at) {
        best[at] = best[at - 1];
        chosen[at] = chosen[at - 1];
      }
      best[at] = value;
      chosen[at] = static_cast<int32_t>(i);
      if (count == k) threshold = best[k - 1];
    }
  }
  for (int32_t i = 0; count < k; ++i) {
    if (contains(chosen, count, i)) continue;
    best[count] = values[i];
    chosen[count++] = i;
  }
}

void sort_ascending(int32_t* indices, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const int32_t index = indices[i];
    int64_t at = i;
    for (; at > 0 && indices[at - 1] > index; --at) indices[at] = indices[at - 1];
    indices[at] = index;
  }
}

/// Scratch memory of a run of tokens. Selection compares in fp64: scores around 0.5 plus a bias often differ by less
/// than fp32 resolves, and ties from rounding would be broken differently on another processor.
struct Scratch {
  double* values;        // [E] values that selection compares
  double* best;          // [E] the chosen values
  double* group_scores;  // [groups]
  float* best_logits;    // [E]
  int32_t* chosen;       // [E]

  static int64_t bytes(const mimo_router_forward_args& args) {
    return (2 * args.experts + args.expert_groups) * static_cast<int64_t>(sizeof(double)) +
           2 * (args.experts + args.experts % 2) * static_cast<int64_t>(sizeof(float));
  }
  Scratch(char* at, const mimo_router_forward_args& args)
      : values(reinterpret_cast<double*>(at)),
        best(values + args.experts),
        group_scores(best + args.experts),
        best_logits(reinterpret_cast<float*>(group_scores + args.expert_groups)),
        chosen(reinterpret_cast<int32_t*>(best_logits + args.experts)) {}
};

/// Group-limited top-k: sets values outside the group_topk best groups to -infinity (docs/spec/language-model.md §4.2
/// item 4). A group's score is the sum of its group_score_topk best values; with softmax before top-k, of their
/// probabilities, since sums of logits are ordered differently. The common divisor of the probabilities does not change
/// the order and is omitted.
void limit_groups(const mimo_router_forward_args& args, const float* logits, const Scratch& scratch) {
  const int64_t groups = args.expert_groups, size = args.experts / groups;
  const bool probabilities = args.score_function == MIMO_SCORE_SOFTMAX && args.pre_softmax;
  const double shift = probabilities ? maximum(logits, args.experts) : 0;
  for (int64_t g = 0; g < groups; ++g) {
    select_largest(scratch.values + g * size, size, args.group_score_topk, scratch.best, scratch.chosen);
    double score = 0;
    for (int64_t i = 0; i < args.group_score_topk; ++i) {
      const double value = scratch.best[i];
      if (!probabilities) score += value;
      else if (value > -INFINITY) score += std::exp(value - shift);
    }
    scratch.group_scores[g] = score;
  }
  select_largest(scratch.group_scores, groups, args.group_topk, scratch.best, scratch.chosen);
  for (int64_t g = 0; g < groups; ++g) {
    if (contains(scratch.chosen, args.group_topk, g)) continue;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) scratch.values[i] = -INFINITY;
  }
}

void scores_of_token(const mimo_router_forward_args& args, const float* logits, float* scores) {
  const int64_t experts = args.experts;
  if (args.score_function == MIMO_SCORE_SIGMOID) {
#pragma omp simd
    for (int64_t e = 0; e < experts; ++e) scores[e] = sigmoid(logits[e]);
    return;
  }
  const float scale = 1.0f / exponentials(logits, scores, experts);
#pragma omp simd
  for (int64_t e = 0; e < experts; ++e) scores[e] *= scale;
}

void weights_of_token(const mimo_router_forward_args& args, const float* logits, const float* scores,
                      const int32_t* index, float* weights) {
  const int64_t topk = args.topk;
  if (args.score_function == MIMO_SCORE_SOFTMAX && !args.pre_softmax) {
    for (int64_t k = 0; k < topk; ++k) weights[k] = logits[index[k]];
    const float scale = args.scaling_factor / exponentials(weights, weights, topk);
    for (int64_t k = 0; k < topk; ++k) weights[k] *= scale;
    return;
  }
  for (int64_t k = 0; k < topk; ++k) weights[k] = scores[index[k]];
  float scale = args.scaling_factor;
  if (args.score_function == MIMO_SCORE_SIGMOID && topk > 1) scale /= sum(weights, topk) + 1e-20f;
  for (int64_t k = 0; k < topk; ++k) weights[k] *= scale;
}

/// Per-token values for the balancing loss.
struct TokenStatistics {
  uint8_t* selected;     // [T, E] membership of the unbiased, ungrouped top-k; 0 for padding
  float* normalisation;  // [T] 1 / Σ_e s_e; 0 for padding
};

void count_token(const mimo_router_forward_args& args, int64_t token, const Scratch& scratch,
                 const TokenStatistics& to) {
  const int64_t experts = args.experts;
  uint8_t* selected = to.selected + token * experts;
  std::memset(selected, 0, static_cast<size_t>(experts));
  to.normalisation[token] = 0;
  if (args.padding_mask && args.padding_mask[token]) return;
  const bool sigmoid_scores = args.score_function == MIMO_SCORE_SIGMOID;
  const float* scores = args.scores + token * experts;
  to.normalisation[token] = sigmoid_scores ? 1.0f / (sum(scores, experts) + 1e-20f) : 1.0f;
  if (args.expert_bias == nullptr && args.logit_offsets == nullptr && args.expert_groups == 1) {
    const int32_t* routed = args.expert_index + token * args.topk;
    for (int64_t k = 0; k < args.topk; ++k) selected[routed[k]] = 1;
    return;
  }
  // Compared by logits: scores have the same order but lose small differences.
  select_largest(args.logits + token * experts, experts, args.topk, scratch.best_logits, scratch.chosen);
  for (int64_t k = 0; k < args.topk; ++k) selected[scratch.chosen[k]] = 1;
}

void route_token(const mimo_router_forward_args& args, int64_t token, const Scratch& scratch) {
  const int64_t experts = args.experts;
  const float* logits = args.logits + token * experts;
  float* scores = args.scores + token * experts;
  int32_t* index = args.expert_index + token * args.topk;
  scores_of_token(args, logits, scores);
  // Compared by logits, because scores have the same order but lose small differences; unless a bias is added to the
  // scores or groups sum them.
  const bool by_score =
      args.score_function == MIMO_SCORE_SIGMOID && (args.expert_bias != nullptr || args.expert_groups > 1);
  for (int64_t e = 0; e < experts; ++e) {
    const double key = by_score ? 1.0 / (1.0 + std::exp(-static_cast<double>(logits[e]))) : logits[e];
    const float* const added = args.expert_bias ? args.expert_bias : args.logit_offsets;
    scratch.values[e] = added ? key + added[e] : key;
  }
  if (args.expert_groups > 1) limit_groups(args, logits, scratch);
  select_largest(scratch.values, experts, args.topk, scratch.best, index);
  sort_ascending(index, args.topk);
  weights_of_token(args, logits, scores, index, args.probabilities + token * args.topk);
}

/// Counts, sums of normalised scores and token numbers of each sequence; a task is a block of experts of one sequence.
void sequence_statistics(mimo_stream& stream, const mimo_router_forward_args& args, const TokenStatistics& of) {
  constexpr int64_t width = 32;
  const int64_t experts = args.experts, blocks = (experts + width - 1) / width;
  parallel_for(stream.device->threads, args.sequences * blocks, [&](int64_t task) {
    const int64_t q = task / blocks, first = task % blocks * width;
    const int64_t count = experts - first < width ? experts - first : width;
    double sums[width] = {};
    int32_t counts[width] = {};
    int64_t tokens = 0;
    for (int64_t t = args.cu_seqlens[q]; t < args.cu_seqlens[q + 1]; ++t) {
      if (args.padding_mask && args.padding_mask[t]) continue;
      ++tokens;
      const float* scores = args.scores + t * experts + first;
      const uint8_t* selected = of.selected + t * experts + first;
      const float normalisation = of.normalisation[t];
#pragma omp simd
      for (int64_t e = 0; e < count; ++e) {
        sums[e] += static_cast<double>(scores[e] * normalisation);
        counts[e] += selected[e];
      }
    }
    for (int64_t e = 0; e < count; ++e) {
      args.sequence_counts[q * experts + first + e] = static_cast<float>(counts[e]);
      args.sequence_score_sums[q * experts + first + e] = static_cast<float>(sums[e]);
    }
    if (first == 0) args.sequence_tokens[q] = static_cast<float>(tokens);
  });
}

}  // namespace

void router_forward(mimo_stream& stream, const mimo_router_forward_args& args) {
  require_valid(args);
  const bool statistics = args.sequence_counts != nullptr;

  const int64_t floats = static_cast<int64_t>(sizeof(float));
  const int64_t runs = (args.tokens + rows_per_partial - 1) / rows_per_partial;
  Workspace scratch(&stream, runs * Scratch::bytes(args));
  Workspace normalisation(&stream, statistics ? args.tokens * floats : 0);
  Workspace selected(&stream, statistics ? args.tokens * args.experts : 0);
  const TokenStatistics token_statistics{selected.as<uint8_t>(), normalisation.as<float>()};

  parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
    const Scratch own(scratch.as<char>() + begin / rows_per_partial * Scratch::bytes(args), args);
    for (int64_t t = begin; t < end; ++t) {
      route_token(args, t, own);
      if (statistics) count_token(args, t, own, token_statistics);
    }
  });
  if (args.tokens_per_expert) {
    for (int64_t t = 0; t < args.tokens; ++t) {
      if (args.padding_mask && args.padding_mask[t]) continue;
      for (int64_t k = 0; k < args.topk; ++k) ++args.tokens_per_expert[args.expert_index[t * args.topk + k]];
    }
  }
  if (statistics) sequence_statistics(stream, args, token_statistics);
}

}  // namespace mimo::MIMO_ISA
