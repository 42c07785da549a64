// Columns times factors that rings of columns share (docs/spec/elastic.md §9), and router logits of masked experts (§10).
// The sums of a ring's gradient are cut by rows alone and added in order.
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

/// factors[c] = m_c.
void spread(const int32_t* rings, const float* values, int64_t width, float* factors) {
  for (int64_t c = 0; c < width; ++c) {
    const int32_t ring = rings == nullptr ? 0 : rings[c];
    factors[c] = ring < 0 ? 1.0f : values[ring];
  }
}

template <class T>
void forward_row(const T* x, const float* factors, T* y, int64_t width) {
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) store(&y[c], factors[c] * load(x[c]));
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

/// dvalues[k] += the sum of the columns of ring k.
void add_rings(const float* columns, const int32_t* rings, int64_t width, int64_t ring_count, float* dvalues) {
  for (int64_t k = 0; k < ring_count; ++k) {
    double sum = 0;
    for (int64_t c = 0; c < width; ++c) {
      if ((rings == nullptr ? 0 : rings[c]) == k) sum += static_cast<double>(columns[c]);
    }
    dvalues[k] += static_cast<float>(sum);
  }
}

float score_logit(float logit, float m) {
  if (m >= 1.0f) return logit;
  if (logit > 0.0f) return std::log(m) - std::log(std::exp(-logit) + (1.0f - m));
  return logit + std::log(m) - std::log1p((1.0f - m) * std::exp(logit));
}

struct Slopes {
  float logit, value;
};

/// Of score_logit.
Slopes score_slopes(float logit, float m) {
  if (m >= 1.0f) return {1.0f, 1.0f + std::exp(logit)};
  const float other = 1.0f / (std::exp(-logit) + (1.0f - m));
  return {1.0f - (1.0f - m) * other, 1.0f / m + other};
}

constexpr float blocked_logit = -1e30f;

}  // namespace

void mask_columns_forward(mimo_stream& stream, const mimo_mask_columns_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "mask_columns_forward");
  Workspace workspace(&stream, args.width * static_cast<int64_t>(sizeof(float)));
  float* const factors = workspace.as<float>();
  spread(args.rings, args.values, args.width, factors);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_range(stream.device->threads, live_rows(args.rows, args.row_count), rows_per_partial,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       forward_row(static_cast<const T*>(args.x) + row * args.x_stride, factors,
                                   static_cast<T*>(args.y) + row * args.y_stride, args.width);
                     }
                   });
  });
}

void mask_columns_backward(mimo_stream& stream, const mimo_mask_columns_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && args.ring_count >= 1, "mask_columns_backward");
  const int64_t rows = live_rows(args.rows, args.row_count);
  const int64_t partials = (rows + rows_per_partial - 1) / rows_per_partial;
  const int64_t lines = 2 + (args.dvalues == nullptr ? 0 : partials);
  Workspace workspace(&stream, lines * args.width * static_cast<int64_t>(sizeof(float)));
  float* const factors = workspace.as<float>();
  float* const total = factors + args.width;
  float* const partial = total + args.width;
  spread(args.rings, args.values, args.width, factors);
  with_dtype(args.x_dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_dtype(args.gradient_dtype, [&](auto* g) {
      using G = std::remove_pointer_t<decltype(g)>;
      parallel_range(stream.device->threads, rows, rows_per_partial, [&](int64_t begin, int64_t end) {
        float* const sums = partial + begin / rows_per_partial * args.width;
        if (args.dvalues != nullptr) std::memset(sums, 0, static_cast<size_t>(args.width) * sizeof(float));
        for (int64_t row = begin; row < end; ++row) {
          const G* const dy = static_cast<const G*>(args.dy) + row * args.dy_stride;
          // Before dx, which may be dy.
          if (args.dvalues != nullptr) {
            add_products(dy, static_cast<const T*>(args.x) + row * args.x_stride, sums, args.width);
          }
          if (args.dx != nullptr) {
            gradient_row(dy, factors, static_cast<G*>(args.dx) + row * args.dx_stride, args.width, args.accumulate != 0);
          }
        }
      });
    });
  });
  if (args.dvalues == nullptr) return;
  std::memset(total, 0, static_cast<size_t>(args.width) * sizeof(float));
  add_partials(stream, partial, partials, args.width, total);
  add_rings(total, args.rings, args.width, args.ring_count, args.dvalues);
}

void mask_scores_forward(mimo_stream& stream, const mimo_mask_scores_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.experts >= 1, "mask_scores_forward");
  Workspace workspace(&stream, args.experts * static_cast<int64_t>(sizeof(float)));
  float* const factors = workspace.as<float>();
  spread(args.rings, args.values, args.experts, factors);
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
  MIMO_REQUIRE(args.tokens >= 0 && args.experts >= 1 && args.ring_count >= 1, "mask_scores_backward");
  const int64_t experts = args.experts;
  const int64_t partials = (args.tokens + rows_per_partial - 1) / rows_per_partial;
  Workspace workspace(&stream, (2 + partials) * experts * static_cast<int64_t>(sizeof(float)));
  float* const factors = workspace.as<float>();
  float* const total = factors + experts;
  float* const partial = total + experts;
  spread(args.rings, args.values, experts, factors);
  parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
    float* const sums = partial + begin / rows_per_partial * experts;
    std::memset(sums, 0, static_cast<size_t>(experts) * sizeof(float));
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t e = 0; e < experts; ++e) {
        const int64_t at = token * experts + e;
        const float m = factors[e];
        Slopes slopes{0.0f, 0.0f};
        if (m > 0.0f) slopes = args.sigmoid != 0 ? score_slopes(args.logits[at], m) : Slopes{m, args.logits[at]};
        const float dy = args.dy[at];
        // A slope may be infinite where nothing comes back.
        if (dy != 0.0f) sums[e] += dy * slopes.value;
        if (args.dlogits != nullptr) args.dlogits[at] = dy * slopes.logit;
      }
    }
  });
  if (args.dvalues == nullptr) return;
  std::memset(total, 0, static_cast<size_t>(experts) * sizeof(float));
  add_partials(stream, partial, partials, experts, total);
  add_rings(total, args.rings, experts, args.ring_count, args.dvalues);
}

}  // namespace mimo::MIMO_ISA
