// Attention sinks (docs/spec/families.md 2.3): o σ(lse - z) of a head's softmax whose denominators count exp(z) too.
#include "kernel.h"

namespace mimo::MIMO_ISA {

void attention_sinks_forward(mimo_stream& stream, const mimo_attention_sinks_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.heads >= 0 && args.head_dim > 0, "attention_sinks_forward");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_range(stream.device->threads, args.tokens * args.heads, rows_per_partial, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float sink = load(static_cast<const T*>(args.sinks)[row % args.heads]), before = args.lse[row];
        const float kept = 1.0f / (1.0f + std::exp(sink - before));
        T* const o = static_cast<T*>(args.o) + row * args.head_dim;
#pragma omp simd
        for (int64_t i = 0; i < args.head_dim; ++i) store(&o[i], kept * load(o[i]));
        args.lse[row] = std::fmax(before, sink) + std::log1p(std::exp(-std::fabs(before - sink)));
      }
    });
  });
}

void attention_sinks_backward(mimo_stream& stream, const mimo_attention_sinks_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.heads >= 0 && args.head_dim > 0, "attention_sinks_backward");
  const int64_t partials = (args.tokens + rows_per_partial - 1) / rows_per_partial;
  Workspace workspace(&stream, partials * args.heads * static_cast<int64_t>(sizeof(float)));
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
      float* const sums = workspace.as<float>() + begin / rows_per_partial * args.heads;
      for (int64_t head = 0; head < args.heads; ++head) {
        const float sink = load(static_cast<const T*>(args.sinks)[head]);
        sums[head] = 0;
        for (int64_t token = begin; token < end; ++token) {
          const T* d_o = static_cast<const T*>(args.d_o) + token * args.d_o_stride + head * args.head_dim;
          const T* o = static_cast<const T*>(args.o) + (token * args.heads + head) * args.head_dim;
          const float dot = sum_over(args.head_dim, [=](int64_t i) { return load(d_o[i]) * load(o[i]); });
          sums[head] -= std::exp(sink - args.lse[token * args.heads + head]) * dot;
        }
      }
    });
  });
  add_partials(stream, workspace.as<float>(), partials, args.heads, args.dsinks);
}

}  // namespace mimo::MIMO_ISA
