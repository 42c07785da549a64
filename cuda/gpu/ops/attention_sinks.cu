// Attention sinks (docs/spec/families.md 2.3): o σ(lse - z) of a head's softmax whose denominators count exp(z) too.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256, warps = threads / 32;
/// Tokens of a partial sum.
constexpr int64_t tokens_per_piece = 128;

/// A warp for each token and head.
template <class T>
__global__ void __launch_bounds__(threads) forward_kernel(mimo_attention_sinks_forward_args args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= args.tokens * args.heads) return;
  const float sink = load(static_cast<const T*>(args.sinks) + row % args.heads), before = args.lse[row];
  const float kept = sigmoid(before - sink);
  T* const o = static_cast<T*>(args.o) + row * args.head_dim;
  for (int64_t i = threadIdx.x % 32; i < args.head_dim; i += 32) store(o + i, kept * load(o + i));
  __syncwarp();
  if (threadIdx.x % 32 == 0) args.lse[row] = fmaxf(before, sink) + log1pf(expf(-fabsf(before - sink)));
}

/// partial[piece][head] = -Σ exp(sink - lse) (d_o · o) over the piece's tokens; a warp for each token.
template <class T>
__global__ void __launch_bounds__(threads) backward_kernel(mimo_attention_sinks_backward_args args, float* partial) {
  __shared__ float shared[32];
  const int64_t head = blockIdx.x, first = static_cast<int64_t>(blockIdx.y) * tokens_per_piece;
  const int64_t last = smaller(args.tokens, first + tokens_per_piece);
  const float sink = load(static_cast<const T*>(args.sinks) + head);
  float sum[1] = {};
  for (int64_t token = first + threadIdx.x / 32; token < last; token += warps) {
    const T* d_o = static_cast<const T*>(args.d_o) + token * args.d_o_stride + head * args.head_dim;
    const T* o = static_cast<const T*>(args.o) + (token * args.heads + head) * args.head_dim;
    const float share = expf(sink - args.lse[token * args.heads + head]);
    for (int64_t i = threadIdx.x % 32; i < args.head_dim; i += 32) sum[0] -= share * load(d_o + i) * load(o + i);
  }
  block_sum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.y * args.heads + head] = sum[0];
}

}  // namespace

void attention_sinks_forward(mimo_stream& stream, const mimo_attention_sinks_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.heads >= 0 && args.head_dim > 0, "attention_sinks_forward");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    launch(stream, forward_kernel<T>, grid_of(ceil_div(args.tokens * args.heads, warps)), dim3(threads), 0, args);
  });
}

void attention_sinks_backward(mimo_stream& stream, const mimo_attention_sinks_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.heads >= 0 && args.head_dim > 0, "attention_sinks_backward");
  const int64_t pieces = ceil_div(args.tokens, tokens_per_piece);
  Workspace partial(&stream, pieces * args.heads * static_cast<int64_t>(sizeof(float)));
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    launch(stream, backward_kernel<T>, grid_of(args.heads, pieces), dim3(threads), 0, args, partial.as<float>());
  });
  if (pieces > 0) add_partials(stream, partial.as<float>(), pieces, args.heads, args.dsinks);
}

}  // namespace mimo::cuda
