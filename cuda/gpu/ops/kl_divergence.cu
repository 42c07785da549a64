// KL divergence of the student's distribution over the vocabulary from the teacher's, on vocabulary shards
// (docs/spec/elastic.md §11). One block a token.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

/// Indices of a token's statistics.
enum Statistic : int64_t { student_max, student_sum, teacher_max, teacher_sum, teacher_dot, statistic_count };

constexpr int threads = 256;

/// Maximum over a block, returned to every thread.
__device__ __forceinline__ float block_max(float value, float* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = warp_max(value);
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  return warp_max(lane < threads / 32 ? shared[lane] : -INFINITY);
}

template <class S, class T>
__global__ void statistics_kernel(mimo_kl_statistics_args args) {
  __shared__ float shared[3 * 32];
  const int64_t token = blockIdx.x;
  const S* const student = static_cast<const S*>(args.student) + token * args.vocabulary_rows;
  const T* const teacher = static_cast<const T*>(args.teacher) + token * args.vocabulary_rows;
  const float factor = args.inverse_temperature;
  float top = -INFINITY, peak = -INFINITY;
  for (int64_t v = threadIdx.x; v < args.vocabulary_live; v += threads) {
    top = fmaxf(top, factor * load(student + v));
    peak = fmaxf(peak, factor * load(teacher + v));
  }
  top = block_max(top, shared);
  peak = block_max(peak, shared);
  __syncthreads();
  float sum[3] = {};
  for (int64_t v = threadIdx.x; v < args.vocabulary_live; v += threads) {
    const float s = factor * load(student + v), t = factor * load(teacher + v);
    const float weight = expf(t - peak);
    sum[0] += expf(s - top);
    sum[1] += weight;
    sum[2] += weight * (t - s);
  }
  block_sum(sum, shared);
  if (threadIdx.x != 0) return;
  float* const to = args.statistics + token;
  to[student_max * args.tokens] = top;
  to[student_sum * args.tokens] = sum[0];
  to[teacher_max * args.tokens] = peak;
  to[teacher_sum * args.tokens] = sum[1];
  to[teacher_dot * args.tokens] = sum[2];
}

__global__ void loss_kernel(mimo_kl_loss_args args) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= args.tokens) return;
  const auto at = [&](int64_t shard, int64_t statistic) {
    return args.statistics[(shard * statistic_count + statistic) * args.tokens + token];
  };
  float top = -INFINITY, peak = -INFINITY;
  for (int64_t i = 0; i < args.shards; ++i) {
    top = fmaxf(top, at(i, student_max));
    peak = fmaxf(peak, at(i, teacher_max));
  }
  double sum = 0, weight = 0, dot = 0;
  for (int64_t i = 0; i < args.shards; ++i) {
    // A shard of padding only has no maximum.
    if (at(i, student_sum) == 0.0f && at(i, teacher_sum) == 0.0f) continue;
    const double own = exp(static_cast<double>(at(i, teacher_max) - peak));
    sum += exp(static_cast<double>(at(i, student_max) - top)) * static_cast<double>(at(i, student_sum));
    weight += own * static_cast<double>(at(i, teacher_sum));
    dot += own * static_cast<double>(at(i, teacher_dot));
  }
  const double student = static_cast<double>(top) + log(sum), teacher = static_cast<double>(peak) + log(weight);
  args.student_lse[token] = static_cast<float>(student);
  args.teacher_lse[token] = static_cast<float>(teacher);
  args.loss[token] = static_cast<float>(dot / weight - teacher + student);
}

template <class S, class T>
__global__ void backward_kernel(mimo_kl_backward_args args) {
  for_each_pack(args.tokens, args.vocabulary_rows, [&](int64_t token, int64_t v) {
    const int64_t at = token * args.vocabulary_rows + v;
    S* const to = static_cast<S*>(args.dlogits) + at;
    if (v >= args.vocabulary_live) return store(to, 0.0f);
    const float factor = args.inverse_temperature;
    const float s = expf(factor * load(static_cast<const S*>(args.student) + at) - args.student_lse[token]);
    const float t = expf(factor * load(static_cast<const T*>(args.teacher) + at) - args.teacher_lse[token]);
    store(to, args.dloss[token] * factor * (s - t));
  });
}

template <class Body>
void with_two_dtypes(int32_t student, int32_t teacher, Body&& body) {
  with_dtype(student, [&](auto* s) { with_dtype(teacher, [&](auto* t) { body(s, t); }); });
}

}  // namespace

void kl_statistics(mimo_stream& stream, const mimo_kl_statistics_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.vocabulary_live >= 0 && args.vocabulary_live <= args.vocabulary_rows,
               "kl_statistics");
  with_two_dtypes(args.student_dtype, args.teacher_dtype, [&](auto* s, auto* t) {
    launch(stream, statistics_kernel<std::remove_pointer_t<decltype(s)>, std::remove_pointer_t<decltype(t)>>,
           grid_of(args.tokens), dim3(threads), 0, args);
  });
}

void kl_loss(mimo_stream& stream, const mimo_kl_loss_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.shards >= 1, "kl_loss");
  launch(stream, loss_kernel, grid_of(ceil_div(args.tokens, 128)), dim3(128), 0, args);
}

void kl_backward(mimo_stream& stream, const mimo_kl_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.vocabulary_live >= 0 && args.vocabulary_live <= args.vocabulary_rows, "kl_backward");
  if (args.tokens == 0 || args.vocabulary_rows == 0) return;
  with_two_dtypes(args.student_dtype, args.teacher_dtype, [&](auto* s, auto* t) {
    const auto [grid, block] = cover(args.tokens, args.vocabulary_rows);
    launch(stream, backward_kernel<std::remove_pointer_t<decltype(s)>, std::remove_pointer_t<decltype(t)>>, grid, block, 0, args);
  });
}

}  // namespace mimo::cuda
