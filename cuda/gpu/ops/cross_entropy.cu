// Cross-entropy with z-loss over a vocabulary that may be sharded (docs/spec/language-model.md §5.2): maximum and sum
// of exponentials of a shard, their combination into losses, and the gradient of the logits. One block a token; logits
// are read once.
#include "packed.cuh"

namespace mimo::cuda {
namespace {

constexpr int row_threads = 512;

struct Statistics {
  float maximum, sum;
};

/// Merges maximum and Σ exp(l - maximum) of two sets. If both maxima are -inf nothing is subtracted: -inf - -inf is
/// NaN.
__device__ __forceinline__ Statistics combined(Statistics a, Statistics b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  if (maximum == -INFINITY) return {maximum, a.sum + b.sum};
  return {maximum, a.sum * expf(a.maximum - maximum) + b.sum * expf(b.maximum - maximum)};
}

/// Packs of a thread whose loads are in flight together; resident blocks an SM.
constexpr int statistics_batch = 2, statistics_blocks = 3;
/// -infinity as a 32-bit word: two of bf16 or one of fp32.
template <class T>
constexpr uint32_t minus_infinity = sizeof(T) == 4 ? 0xFF800000u : 0xFF80FF80u;

template <class T, int Width>
__global__ void __launch_bounds__(row_threads, statistics_blocks) statistics_kernel(mimo_cross_entropy_statistics_args args) {
  __shared__ Statistics shared[32];
  const int64_t token = blockIdx.x;
  const T* logits = static_cast<const T*>(args.logits) + token * args.vocabulary_rows;
  Statistics own{-INFINITY, 0.0f};
  const int live = static_cast<int>(args.vocabulary_live), whole = live / Width * Width;
  using Batch = Packed<T, Width>[statistics_batch];
  const auto fetch = [&](Batch& batch, int at) {
#pragma unroll
    for (int j = 0; j < statistics_batch; ++j, at += row_threads * Width) {
      if (at < whole) {
        batch[j] = read_packed<Width>(logits + at);
      } else {
#pragma unroll
        for (auto& word : batch[j].word) word = static_cast<typename Packed<T, Width>::Word>(minus_infinity<T>);
      }
    }
  };
  const auto add_batch = [&](const Batch& batch) {
    float highest = own.maximum;
#pragma unroll
    for (int j = 0; j < statistics_batch; ++j) {
#pragma unroll
      for (int i = 0; i < Width; ++i) highest = fmaxf(highest, batch[j].get(i));
    }
    // If the maximum is -inf nothing is subtracted: -inf - -inf is NaN, exp(-inf) is 0.
    const float shift = highest == -INFINITY ? 0.0f : highest;
    float sum = own.sum * exp_for(logits, own.maximum - shift);
#pragma unroll
    for (int j = 0; j < statistics_batch; ++j) {
#pragma unroll
      for (int i = 0; i < Width; ++i) sum += exp_for(logits, batch[j].get(i) - shift);
    }
    own = {highest, sum};
  };
  constexpr int stride = statistics_batch * row_threads * Width;
  Batch batch, next;
  fetch(batch, threadIdx.x * Width);
  for (int at = threadIdx.x * Width; at < whole; at += stride) {
    fetch(next, at + stride);
    add_batch(batch);
#pragma unroll
    for (int j = 0; j < statistics_batch; ++j) batch[j] = next[j];
  }
  if (const int at = whole + static_cast<int>(threadIdx.x); at < live) {
    const float l = load(logits + at);
    own = combined(own, {l, l == -INFINITY ? 0.0f : 1.0f});
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Statistics other{__shfl_xor_sync(all_lanes, own.maximum, offset),
                           __shfl_xor_sync(all_lanes, own.sum, offset)};
    own = combined(own, other);
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < blockDim.x / 32; ++warp) own = combined(own, shared[warp]);
  const int64_t label = args.labels[token] - args.vocabulary_start;
  const bool owned = label >= 0 && label < args.vocabulary_live;
  args.maximum[token] = own.maximum;
  args.sum_exp[token] = own.sum;
  args.target_logit[token] = owned ? load(logits + label) : 0.0f;
  args.found[token] = owned ? 1 : 0;
}

__global__ void loss_kernel(mimo_cross_entropy_loss_args args) {
  for_each_pack(1, args.tokens, [&](int64_t, int64_t token) {
    float maximum = -INFINITY;
    for (int64_t s = 0; s < args.shards; ++s) {
      const float m = args.maximum[s * args.tokens + token];
      maximum = m > maximum ? m : maximum;
    }
    double sum = 0, target = static_cast<double>(maximum);
    for (int64_t s = 0; s < args.shards; ++s) {
      const int64_t at = s * args.tokens + token;
      sum += static_cast<double>(args.sum_exp[at]) * exp(static_cast<double>(args.maximum[at] - maximum));
      if (args.found[at] != 0) target = static_cast<double>(args.target_logit[at]);
    }
    const double lse = static_cast<double>(maximum) + log(sum);
    args.lse[token] = static_cast<float>(lse);
    args.loss[token] = static_cast<float>(lse - target + static_cast<double>(args.z_loss) * lse * lse);
  });
}

/// dlogits may alias logits: a thread writes only elements it has read, and the label's column belongs to one thread.
template <class T, int Width>
__global__ void backward_kernel(mimo_cross_entropy_backward_args args, bool round) {
  const int64_t token = blockIdx.x;
  const T* logits = static_cast<const T*>(args.logits) + token * args.vocabulary_rows;
  T* dlogits = static_cast<T*>(args.dlogits) + token * args.vocabulary_rows;
  const float dloss = args.dloss[token], lse = args.lse[token];
  const float factor = 1.0f + 2.0f * args.z_loss * lse;
  const int64_t label = args.labels[token] - args.vocabulary_start;
  for (int64_t at = threadIdx.x * Width; at < args.vocabulary_rows; at += blockDim.x * Width) {
    float value[Width] = {};
    if (dloss != 0) {  // logits of masked tokens, the majority in image batches, are not read
      read(logits + at, value);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float target = at + i == label ? 1.0f : 0.0f;
        float gradient = at + i < args.vocabulary_live ? dloss * (factor * expf(value[i] - lse) - target) : 0.0f;
        if (round) gradient = __bfloat162float(__float2bfloat16_rn(gradient));
        value[i] = gradient;
      }
    }
    write(dlogits + at, value);
  }
}

}  // namespace

void cross_entropy_statistics(mimo_stream& stream, const mimo_cross_entropy_statistics_args& args) {
  MIMO_REQUIRE(args.tokens >= 0, "cross_entropy_statistics");
  MIMO_REQUIRE(args.vocabulary_live >= 0 && args.vocabulary_live <= args.vocabulary_rows, "cross_entropy_statistics");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    with_width<wide>(packs_fit<T>(args.logits, args.vocabulary_rows, args.vocabulary_rows, wide), [&](auto w) {
      launch(stream, statistics_kernel<T, w>, grid_of(args.tokens), dim3(row_threads), 0, args);
    });
  });
}

void cross_entropy_loss(mimo_stream& stream, const mimo_cross_entropy_loss_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.shards > 0, "cross_entropy_loss");
  const auto [grid, block] = cover(1, args.tokens);
  launch(stream, loss_kernel, grid, block, 0, args);
}

void cross_entropy_backward(mimo_stream& stream, const mimo_cross_entropy_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0, "cross_entropy_backward");
  MIMO_REQUIRE(args.vocabulary_live >= 0 && args.vocabulary_live <= args.vocabulary_rows, "cross_entropy_backward");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) {
      return packs_fit<T>(pointer, args.vocabulary_rows, args.vocabulary_rows, wide);
    };
    with_width<wide>(fits(args.logits) && fits(args.dlogits), [&](auto w) {
      // With bf16 storage the result is rounded anyway.
      launch(stream, backward_kernel<T, w>, grid_of(args.tokens), dim3(row_threads), 0, args,
             args.round_bf16 != 0 && std::is_same_v<T, float>);
    });
  });
}

}  // namespace mimo::cuda
