// Balancing loss, z-loss and expert-bias update of the router (docs/spec/language-model.md §4.3, §4.4). Small kernels:
// E values a sequence.
#include "router.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256;

__device__ __forceinline__ double loss_weight(const mimo_router_balancing_loss_args& args, int64_t q) {
  const double tokens = static_cast<double>(args.sequence_tokens[q]) * static_cast<double>(args.sequence_shards);
  if (tokens == 0) return 0;
  return static_cast<double>(args.coefficient) * static_cast<double>(args.experts) /
         (static_cast<double>(args.topk) * static_cast<double>(args.sequences) * tokens * tokens);
}

__global__ void balancing_loss_kernel(mimo_router_balancing_loss_args args) {
  __shared__ double shared[32];
  double loss[1] = {0};
  for (int64_t i = threadIdx.x; i < args.sequences * args.experts; i += threads) {
    loss[0] += loss_weight(args, i / args.experts) * static_cast<double>(args.sequence_counts[i]) *
               static_cast<double>(args.sequence_score_sums[i]);
  }
  block_sum(loss, shared);
  if (threadIdx.x == 0) *args.loss += static_cast<float>(loss[0]);
}

__global__ void balancing_gradient_kernel(mimo_router_balancing_loss_args args) {
  for_each_pack(args.dnormalised_rows, args.experts, [&](int64_t row, int64_t e) {
    const int64_t q = args.sequences == 1 ? 0 : row;
    args.dnormalised[row * args.experts + e] +=
        static_cast<float>(static_cast<double>(args.gradient_scale) * loss_weight(args, q) *
                           static_cast<double>(args.sequence_counts[q * args.experts + e]));
  });
}

/// partial[block] = Σ over the block's tokens of logsumexp².
__global__ void z_loss_kernel(mimo_router_z_loss_args args, double* partial) {
  __shared__ double shared[router_warps];
  const int64_t token = token_of_warp();
  double square = 0;
  if (token < args.tokens && (args.padding_mask == nullptr || args.padding_mask[token] == 0)) {
    const double lse = static_cast<double>(logsumexp(args.logits + token * args.experts, args.experts));
    square = lse * lse;
  }
  if (lane_id() == 0) shared[warp_id()] = square;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double sum = 0;
  for (int warp = 0; warp < router_warps; ++warp) sum += shared[warp];
  partial[blockIdx.x] = sum;
}

__global__ void add_z_loss_kernel(const double* partial, int64_t partials, float* z_loss) {
  __shared__ double shared[32];
  double sum[1] = {0};
  for (int64_t i = threadIdx.x; i < partials; i += threads) sum[0] += partial[i];
  block_sum(sum, shared);
  if (threadIdx.x == 0) *z_loss += static_cast<float>(sum[0]);
}

__global__ void bias_update_kernel(mimo_router_bias_update_args args) {
  __shared__ int64_t shared[32];
  int64_t total[1] = {0};
  for (int64_t e = threadIdx.x; e < args.experts; e += threads) total[0] += args.counts[e];
  block_sum(total, shared);
  for (int64_t e = threadIdx.x; e < args.experts; e += threads) {
    // sign(mean - count) in integers, hence exact.
    const int64_t difference = total[0] - args.counts[e] * args.experts;
    if (difference != 0) args.bias[e] += difference > 0 ? args.rate : -args.rate;
    args.counts[e] = 0;
  }
}

}  // namespace

void router_balancing_loss(mimo_stream& stream, const mimo_router_balancing_loss_args& args) {
  MIMO_REQUIRE(args.dnormalised == nullptr || args.sequences == 1 || args.dnormalised_rows == args.sequences,
               "router_balancing_loss");
  if (args.loss != nullptr) launch(stream, balancing_loss_kernel, dim3(1), dim3(threads), 0, args);
  if (args.dnormalised == nullptr) return;
  const auto [grid, block] = cover(args.dnormalised_rows, args.experts);
  launch(stream, balancing_gradient_kernel, grid, block, 0, args);
}

void router_z_loss(mimo_stream& stream, const mimo_router_z_loss_args& args) {
  const int64_t partials = ceil_div(args.tokens, router_warps);
  Workspace workspace(&stream, partials * static_cast<int64_t>(sizeof(double)));
  launch(stream, z_loss_kernel, grid_of(partials), dim3(32 * router_warps), 0, args, workspace.as<double>());
  launch(stream, add_z_loss_kernel, dim3(1), dim3(threads), 0, workspace.as<double>(), partials, args.z_loss);
}

void router_bias_update(mimo_stream& stream, const mimo_router_bias_update_args& args) {
  launch(stream, bias_update_kernel, dim3(1), dim3(threads), 0, args);
}

}  // namespace mimo::cuda
