// The last step of the gated delta rule's backward for a chunk and head (gated_delta.h): from the gradients of the cumulative sum of g to
// those of b, a, dt_bias and A_log.
#pragma once
#include "gated_delta.h"
#include "ssd.cuh"

namespace mimo::cuda {

/// One warp; lane l handles tokens 2 l and 2 l + 1. `own`: their gradients of the sum; `products`: their R · U.
__device__ __forceinline__ void finish_decays(const mimo_gated_delta_backward_args& args, int64_t begin, int count, int64_t head,
                                              const DeltaSteps& steps, const float (&own)[2], const float (&products)[2],
                                              SsdHeadSums& to) {
  const int lane = threadIdx.x % 32;
  float suffix = own[0] + own[1];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float later = __shfl_down_sync(all_lanes, suffix, offset);
    if (lane + offset < 32) suffix += later;
  }
  const float rate = -expf(args.a_log[head]), gradient[2] = {suffix, suffix - own[0]};
  float sums[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    if (t >= count) continue;
    const int64_t from = (begin + t) * args.ba_stride + head, at = (begin + t) * args.dba_stride + head;
    const float argument = load(static_cast<const bf16*>(args.a) + from) + args.dt_bias[head];
    const float da = gradient[i] * rate * sigmoid(argument);
    store(static_cast<bf16*>(args.da) + at, da);
    store(static_cast<bf16*>(args.db) + at, products[i] * (1.0f - steps.beta[t]));
    sums[0] += gradient[i] * rate * softplus(argument);
    sums[1] += da;
  }
  sums[0] = warp_sum(sums[0]), sums[1] = warp_sum(sums[1]);
  if (lane == 0) to = SsdHeadSums{0, sums[0], sums[1]};
}

}  // namespace mimo::cuda
