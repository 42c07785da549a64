// Gradient with respect to the logits of the routing weights, the balancing loss and the z-loss
// (docs/spec/language-model.md §4.2, §4.4). The selection and the counts are constants.
#include "router.cuh"

namespace mimo::cuda {
namespace {

/// Iterates over a token's chosen experts, one lane's share: calls body(k, expert).
template <class Body>
__device__ __forceinline__ void for_chosen(const int32_t* index, int64_t topk, Body&& body) {
  for (int64_t k = lane_id(); k < topk; k += 32) body(k, index[k]);
}

__global__ void backward_kernel(mimo_router_backward_args args) {
  extern __shared__ float shared_gradients[];
  const int64_t t = token_of_warp();
  if (t >= args.tokens) return;
  const int64_t experts = args.experts, topk = args.topk;
  float* dlogits = shared_gradients + warp_id() * experts;
  const float* s = args.scores + t * experts;
  const float* g = args.dprobabilities + t * topk;
  const int32_t* index = args.expert_index + t * topk;
  const bool padding = args.padding_mask != nullptr && args.padding_mask[t] != 0;
  const float* dnormalised = nullptr;
  if (args.dnormalised != nullptr && !padding) {
    dnormalised = args.dnormalised + sequence_of(args.cu_seqlens, args.sequences, t) * experts;
  }
  for (int64_t e = lane_id(); e < experts; e += 32) dlogits[e] = 0;
  __syncwarp();

  // Sigmoid scores: routing weights are λ s_e / Σ_selected s (λ s_e for top-1), scores of the balancing loss s_e /
  // Σ_all s. Otherwise softmax over all or over the selected experts.
  if (args.score_function == MIMO_SCORE_SIGMOID) {
    float scale = args.scaling_factor, mean = 0;
    if (topk > 1) {
      float total = 0, dot = 0;
      for_chosen(index, topk, [&](int64_t k, int64_t e) {
        total += s[e];
        dot += g[k] * s[e];
      });
      total = warp_sum(total) + 1e-20f;
      mean = warp_sum(dot) / total;
      scale /= total;
    }
    for_chosen(index, topk,
               [&](int64_t k, int64_t e) { dlogits[e] = scale * (g[k] - mean) * s[e] * (1.0f - s[e]); });
    __syncwarp();
    if (dnormalised != nullptr) {
      const float total = sum_experts(experts, [&](int64_t e) { return s[e]; });
      const float dot = sum_experts(experts, [&](int64_t e) { return dnormalised[e] * s[e]; });
      const float inverse = 1.0f / (total + 1e-20f), average = dot * inverse;
      for (int64_t e = lane_id(); e < experts; e += 32) {
        dlogits[e] += (dnormalised[e] - average) * inverse * s[e] * (1.0f - s[e]);
      }
    }
  } else {
    const float* weights = args.probabilities + t * topk;
    float dot = 0;
    for_chosen(index, topk, [&](int64_t k, int64_t) { dot += g[k] * weights[k]; });
    dot = warp_sum(dot);
    const float mean = args.pre_softmax != 0 ? 0.0f : dot / args.scaling_factor;
    for_chosen(index, topk, [&](int64_t k, int64_t e) { dlogits[e] = weights[k] * (g[k] - mean); });
    __syncwarp();
    float average = args.pre_softmax != 0 ? dot : 0.0f;
    if (dnormalised != nullptr) average += sum_experts(experts, [&](int64_t e) { return dnormalised[e] * s[e]; });
    for (int64_t e = lane_id(); e < experts; e += 32) {
      dlogits[e] += s[e] * ((dnormalised != nullptr ? dnormalised[e] : 0.0f) - average);
    }
  }

  // d logsumexp² = 2 logsumexp softmax.
  const float* logits = args.logits + t * experts;
  float lse = 0, factor = 0;
  if (args.z_loss_scale != 0 && !padding) {
    lse = logsumexp(logits, experts);
    factor = 2.0f * lse * args.z_loss_scale;
  }
  for (int64_t e = lane_id(); e < experts; e += 32) {
    args.dlogits[t * experts + e] = dlogits[e] + (factor != 0 ? factor * expf(logits[e] - lse) : 0.0f);
  }
}

}  // namespace

void router_backward(mimo_stream& stream, const mimo_router_backward_args& args) {
  MIMO_REQUIRE(args.dnormalised == nullptr || args.cu_seqlens != nullptr, "router_backward");
  MIMO_REQUIRE(args.scaling_factor != 0, "router_backward");
  launch(stream, backward_kernel, router_grid(args.tokens), dim3(32 * router_warps),
         router_warps * args.experts * static_cast<int64_t>(sizeof(float)), args);
}

}  // namespace mimo::cuda
