// Router logits of masked experts (docs/spec/elastic.md §10). The gradient of a factor is summed in parts that depend
// on sizes alone, in a fixed order.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

constexpr float blocked_logit = -1e30f;
constexpr int64_t rows_per_partial = 128;

__global__ void scores_forward_kernel(mimo_mask_scores_forward_args args) {
  for_each_pack(args.tokens, args.experts, [&](int64_t token, int64_t e) {
    const float m = args.factors[e];
    const int64_t at = token * args.experts + e;
    const float logit = args.logits[at];
    float y;
    if (m <= 0.0f) {
      y = blocked_logit;
    } else if (args.sigmoid == 0) {
      y = m * logit;
    } else if (m >= 1.0f) {
      y = logit;
    } else if (logit > 0.0f) {
      y = logf(m) - logf(expf(-logit) + (1.0f - m));
    } else {
      y = logit + logf(m) - log1pf((1.0f - m) * expf(logit));
    }
    args.y[at] = y;
  });
}

__global__ void masked_bias_kernel(mimo_mask_scores_forward_args args) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= args.experts) return;
  const float m = args.factors[e];
  const float bias = args.expert_bias[e];
  args.masked_bias[e] = m <= 0.0f ? args.blocked_bias : args.sigmoid != 0 ? m * bias : bias;
}

/// dlogits, and partial[blockIdx.y][e] = Σ over the block's tokens of dy times the derivative by m.
__global__ void scores_backward_kernel(mimo_mask_scores_backward_args args, float* partial) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= args.experts) return;
  const float m = args.factors[e];
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_partial;
  const int64_t end = smaller(begin + rows_per_partial, args.tokens);
  float sum = 0;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t at = token * args.experts + e;
    const float dy = args.dy[at], logit = args.logits[at];
    float by_logit = 0, by_value = 0;
    if (m > 0.0f && args.sigmoid == 0) {
      by_logit = m, by_value = logit;
    } else if (m >= 1.0f) {
      by_logit = 1.0f, by_value = 1.0f + expf(logit);
    } else if (m > 0.0f) {
      const float other = 1.0f / (expf(-logit) + (1.0f - m));
      by_logit = 1.0f - (1.0f - m) * other, by_value = 1.0f / m + other;
    }
    // The derivative may be infinite where dy is 0.
    if (dy != 0.0f) sum += dy * by_value;
    if (args.dlogits != nullptr) args.dlogits[at] = dy * by_logit;
  }
  partial[blockIdx.y * args.experts + e] = sum;
}

}  // namespace

void mask_scores_forward(mimo_stream& stream, const mimo_mask_scores_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.experts >= 1, "mask_scores_forward");
  const auto [grid, block] = cover(args.tokens, args.experts);
  if (args.tokens > 0) launch(stream, scores_forward_kernel, grid, block, 0, args);
  if (args.masked_bias == nullptr || args.expert_bias == nullptr) return;
  launch(stream, masked_bias_kernel, grid_of(ceil_div(args.experts, 128)), dim3(128), 0, args);
}

void mask_scores_backward(mimo_stream& stream, const mimo_mask_scores_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.experts >= 1, "mask_scores_backward");
  if (args.tokens == 0) return;
  const int64_t partials = ceil_div(args.tokens, rows_per_partial);
  MIMO_REQUIRE(partials <= 65535, "mask_scores_backward");
  Workspace workspace(&stream, partials * args.experts * static_cast<int64_t>(sizeof(float)));
  float* const partial = workspace.as<float>();
  launch(stream, scores_backward_kernel, grid_of(ceil_div(args.experts, 128), partials), dim3(128), 0, args, partial);
  if (args.dfactors != nullptr) add_partials(stream, partial, partials, args.experts, args.dfactors);
}

}  // namespace mimo::cuda
