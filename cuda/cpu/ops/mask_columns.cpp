// Elastic models: mask factors, columns times factors (docs/spec/elastic.md §9), and router logits of masked experts
// (§10). The gradient of a factor is summed in parts that depend on the number of rows alone, in a fixed order.
#include "masks.h"

namespace mimo::MIMO_ISA {
namespace {

template <class T>
void forward_row(const T* x, const T* addend, const float* factors, T* y, int64_t width) {
  if (addend == nullptr) {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) store(&y[c], factors[c] * load(x[c]));
  } else {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) store(&y[c], load(addend[c]) + factors[c] * load(x[c]));
  }
}

template <class G>
void gradient_row(const G* dy, const float* factors, G* dx, int64_t width, bool accumulate) {
  if (accumulate) {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) store(&dx[c], load(dx[c]) + factors[c] * load(dy[c]));
  } else {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) store(&dx[c], factors[c] * load(dy[c]));
  }
}

template <class G, class T>
void add_products(const G* dy, const T* x, float* sums, int64_t width) {
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) sums[c] += load(dy[c]) * load(x[c]);
}

float score_logit(float logit, float m) {
  if (m >= 1.0f) return logit;
  if (logit > 0.0f) return std::log(m) - std::log(std::exp(-logit) + (1.0f - m));
  return logit + std::log(m) - std::log1p((1.0f - m) * std::exp(logit));
}

struct Slopes {
  float logit, value;
};

/// Derivatives of score_logit.
Slopes score_slopes(float logit, float m) {
  if (m >= 1.0f) return {1.0f, 1.0f + std::exp(logit)};
  const float other = 1.0f / (std::exp(-logit) + (1.0f - m));
  return {1.0f - (1.0f - m) * other, 1.0f / m + other};
}

constexpr float blocked_logit = -1e30f;

}  // namespace

void mask_factors_forward(mimo_stream& stream, const mimo_mask_factors_forward_args& args) {
  MIMO_REQUIRE(args.batch >= 0 && args.value_count >= 0 && args.factor_count >= 0, "mask_factors_forward");
  parallel_range(stream.device->threads, args.batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const float* const values = args.values + b * args.value_count;
      float* const factors = args.factors + b * args.factor_count;
      for (int64_t i = 0; i < args.factor_count; ++i) factors[i] = args.sources[i] < 0 ? 1.0f : values[args.sources[i]];
    }
  });
}

void mask_factors_backward(mimo_stream& stream, const mimo_mask_factors_backward_args& args) {
  MIMO_REQUIRE(args.batch >= 0 && args.value_count >= 0 && args.factor_count >= 0, "mask_factors_backward");
  parallel_range(stream.device->threads, args.batch * args.value_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const float* const dfactors = args.dfactors + at / args.value_count * args.factor_count;
      const int64_t value = at % args.value_count;
      double sum = 0;
      for (int32_t m = args.starts[value]; m < args.starts[value + 1]; ++m) {
        sum += static_cast<double>(dfactors[args.members[m]]);
      }
      args.dvalues[at] += static_cast<float>(sum);
    }
  });
}

void mask_columns_forward(mimo_stream& stream, const mimo_mask_columns_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "mask_columns_forward");
  const MaskFactors masks(&stream, args.factors, args.scale, args.width);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_range(stream.device->threads, live_rows(args.rows, args.row_count), rows_per_partial,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       const T* const addend = static_cast<const T*>(args.addend);
                       forward_row(static_cast<const T*>(args.x) + row * args.x_stride,
                                   addend == nullptr ? nullptr : addend + row * args.addend_stride, masks.product(),
                                   static_cast<T*>(args.y) + row * args.y_stride, args.width);
                     }
                   });
  });
}

void mask_columns_backward(mimo_stream& stream, const mimo_mask_columns_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "mask_columns_backward");
  const int64_t rows = live_rows(args.rows, args.row_count);
  const bool sums_wanted = args.dfactors != nullptr || args.dscale != nullptr;
  const MaskFactors masks(&stream, args.factors, args.scale, args.width);
  ColumnSums sums(&stream, rows, args.width, sums_wanted);
  with_dtype(args.x_dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_dtype(args.gradient_dtype, [&](auto* g) {
      using G = std::remove_pointer_t<decltype(g)>;
      parallel_range(stream.device->threads, rows, rows_per_partial, [&](int64_t begin, int64_t end) {
        float* const own = sums.cleared_partial(begin);
        for (int64_t row = begin; row < end; ++row) {
          const G* const dy = static_cast<const G*>(args.dy) + row * args.dy_stride;
          // Before dx is written, which may alias dy.
          if (sums_wanted) add_products(dy, static_cast<const T*>(args.x) + row * args.x_stride, own, args.width);
          if (args.dx != nullptr) {
            gradient_row(dy, masks.product(), static_cast<G*>(args.dx) + row * args.dx_stride, args.width,
                         args.accumulate != 0);
          }
        }
      });
    });
  });
  if (sums_wanted) masks.add_gradients(sums.total(), args.dfactors, args.dscale);
}

void mask_scores_forward(mimo_stream& stream, const mimo_mask_scores_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.experts >= 1, "mask_scores_forward");
  const float* const factors = args.factors;
  parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const float* const logits = args.logits + token * args.experts;
      float* const y = args.y + token * args.experts;
      for (int64_t e = 0; e < args.experts; ++e) {
        const float m = factors[e];
        y[e] = m <= 0.0f ? blocked_logit : args.sigmoid != 0 ? score_logit(logits[e], m) : m * logits[e];
      }
    }
  });
  if (args.masked_bias == nullptr || args.expert_bias == nullptr) return;
  for (int64_t e = 0; e < args.experts; ++e) {
    const float m = factors[e];
    args.masked_bias[e] =
        m <= 0.0f ? args.blocked_bias : args.sigmoid != 0 ? m * args.expert_bias[e] : args.expert_bias[e];
  }
}

void mask_scores_backward(mimo_stream& stream, const mimo_mask_scores_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.experts >= 1, "mask_scores_backward");
  const int64_t experts = args.experts;
  const float* const factors = args.factors;
  ColumnSums partials(&stream, args.tokens, experts, true);
  parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
    float* const sums = partials.cleared_partial(begin);
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t e = 0; e < experts; ++e) {
        const int64_t at = token * experts + e;
        const float m = factors[e];
        Slopes slopes{0.0f, 0.0f};
        if (m > 0.0f) slopes = args.sigmoid != 0 ? score_slopes(args.logits[at], m) : Slopes{m, args.logits[at]};
        const float dy = args.dy[at];
        // The derivative may be infinite where dy is 0.
        if (dy != 0.0f) sums[e] += dy * slopes.value;
        if (args.dlogits != nullptr) args.dlogits[at] = dy * slopes.logit;
      }
    }
  });
  if (args.dfactors == nullptr) return;
  const float* const total = partials.total();
  for (int64_t e = 0; e < experts; ++e) args.dfactors[e] += total[e];
}

}  // namespace mimo::MIMO_ISA
