// Shared by the router kernels: one warp a token, the experts are distributed over its lanes.
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

constexpr int router_warps = 8;

/// Per-token values for the balancing loss.
struct TokenStatistics {
  uint8_t* selected;     // [T, E] membership of the unbiased, ungrouped top-k; 0 for padding
  float* normalisation;  // [T] 1 / Σ_e s_e; 0 for padding
};

/// Computes router_forward's scores, choices and weights for common numbers of experts without groups; false for others.
bool route_several(mimo_stream& stream, const mimo_router_forward_args& args, const TokenStatistics& statistics);

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

/// Token of this warp; the grid has a warp for each token.
__device__ __forceinline__ int64_t token_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * router_warps + warp_id();
}
inline dim3 router_grid(int64_t tokens) { return grid_of(ceil_div(tokens, router_warps)); }

/// Σ value(e) over [0, experts) and its maximum.
template <class Value>
__device__ __forceinline__ float sum_experts(int64_t experts, Value&& value) {
  float sum = 0;
  for (int64_t e = lane_id(); e < experts; e += 32) sum += value(e);
  return warp_sum(sum);
}
template <class Value>
__device__ __forceinline__ float max_experts(int64_t experts, Value&& value) {
  float best = -INFINITY;
  for (int64_t e = lane_id(); e < experts; e += 32) best = fmaxf(best, value(e));
  return warp_max(best);
}

__device__ __forceinline__ float logsumexp(const float* logits, int64_t experts) {
  const float shift = max_experts(experts, [&](int64_t e) { return logits[e]; });
  return shift + logf(sum_experts(experts, [&](int64_t e) { return expf(logits[e] - shift); }));
}

}  // namespace mimo::cuda
