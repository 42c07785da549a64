// Gradient with respect to the logits of the routing weights, the balancing loss and the z-loss
// (docs/spec/language-model.md §4.2, §4.4). The selection and the counts are constants.
#include "router.h"

namespace mimo::MIMO_ISA {
namespace {

/// Sigmoid scores, added to dlogits: routing weights λ s_e / Σ_selected s (λ s_e for top-1) and the balancing loss's
/// scores s_e / Σ_all s.
void sigmoid_token(const mimo_router_backward_args& args, int64_t token, const float* dnormalised, float* dlogits) {
  const float* s = args.scores + token * args.experts;
  const float* g = args.dprobabilities + token * args.topk;
  const int32_t* index = args.expert_index + token * args.topk;
  float scale = args.scaling_factor, mean = 0;
  if (args.topk > 1) {
    float total = 1e-20f, dot = 0;
    for (int64_t k = 0; k < args.topk; ++k) {
      total += s[index[k]];
      dot += g[k] * s[index[k]];
    }
    scale /= total;
    mean = dot / total;
  }
  for (int64_t k = 0; k < args.topk; ++k) {
    const float score = s[index[k]];
    dlogits[index[k]] += scale * (g[k] - mean) * score * (1.0f - score);
  }
  if (dnormalised == nullptr) return;
  float total = 0, dot = 0;
#pragma omp simd reduction(+ : total, dot)
  for (int64_t e = 0; e < args.experts; ++e) {
    total += s[e];
    dot += dnormalised[e] * s[e];
  }
  const float inverse = 1.0f / (total + 1e-20f), average = dot * inverse;
#pragma omp simd
  for (int64_t e = 0; e < args.experts; ++e) {
    dlogits[e] += (dnormalised[e] - average) * inverse * s[e] * (1.0f - s[e]);
  }
}

/// Softmax scores, added to dlogits.
void softmax_token(const mimo_router_backward_args& args, int64_t token, const float* dnormalised, float* dlogits) {
  const float* s = args.scores + token * args.experts;
  const float* g = args.dprobabilities + token * args.topk;
  const float* weights = args.probabilities + token * args.topk;
  const int32_t* index = args.expert_index + token * args.topk;
  float dot = 0;
  for (int64_t k = 0; k < args.topk; ++k) dot += g[k] * weights[k];
  // weights = λ s of the selected experts, or λ softmax over the selected logits only.
  const float mean = args.pre_softmax ? 0.0f : dot / args.scaling_factor;
  for (int64_t k = 0; k < args.topk; ++k) dlogits[index[k]] += weights[k] * (g[k] - mean);
  float average = args.pre_softmax ? dot : 0.0f;
  if (dnormalised != nullptr) {
    float losses = 0;
#pragma omp simd reduction(+ : losses)
    for (int64_t e = 0; e < args.experts; ++e) losses += dnormalised[e] * s[e];
    average += losses;
#pragma omp simd
    for (int64_t e = 0; e < args.experts; ++e) dlogits[e] += s[e] * dnormalised[e];
  }
#pragma omp simd
  for (int64_t e = 0; e < args.experts; ++e) dlogits[e] -= s[e] * average;
}

/// d logsumexp² = 2 logsumexp softmax.
void z_loss_token(const float* logits, float scale, float* dlogits, int64_t experts) {
  const float lse = logsumexp(logits, experts);
  const float factor = 2.0f * lse * scale;
#pragma omp simd
  for (int64_t e = 0; e < experts; ++e) dlogits[e] += factor * exp_fast(logits[e] - lse);
}

}  // namespace

void router_backward(mimo_stream& stream, const mimo_router_backward_args& args) {
  MIMO_REQUIRE(args.dnormalised == nullptr || args.cu_seqlens != nullptr, "router_backward");
  MIMO_REQUIRE(args.scaling_factor != 0, "router_backward");
  const int64_t experts = args.experts;
  parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
    int64_t q = 0;
    for (int64_t t = begin; t < end; ++t) {
      float* dlogits = args.dlogits + t * experts;
      std::memset(dlogits, 0, static_cast<size_t>(experts) * sizeof(float));
      const bool padding = args.padding_mask && args.padding_mask[t];
      const float* dnormalised = nullptr;
      if (args.dnormalised && !padding) {
        q = sequence_of(t, args.cu_seqlens, args.sequences, q);
        dnormalised = args.dnormalised + q * experts;
      }
      if (args.score_function == MIMO_SCORE_SIGMOID) {
        sigmoid_token(args, t, dnormalised, dlogits);
      } else {
        softmax_token(args, t, dnormalised, dlogits);
      }
      if (args.z_loss_scale != 0 && !padding) z_loss_token(args.logits + t * experts, args.z_loss_scale, dlogits, experts);
    }
  });
}

}  // namespace mimo::MIMO_ISA
