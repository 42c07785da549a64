// RMSNorm of masked columns (docs/spec/elastic.md §9): y = s h rsqrt(mean(h²) + ε) γ with h = m x or, with a residual
// r, h = m (r + f x).
#include "masks.h"
#include "vectors.h"

namespace mimo::MIMO_ISA {
namespace {

template <class T>
void add_residual(const T* x, const float* factors, const T* residual, T* sum, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) store(&sum[i], load(residual[i]) + factors[i] * load(x[i]));
}

template <class T>
void masked_group(const T* x, const float* factors, float* h, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) h[i] = factors == nullptr ? load(x[i]) : factors[i] * load(x[i]);
}

template <class T, class W>
void scale_group(const float* h, const W* weight, float factor, T* y, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) store(&y[i], h[i] * factor * load(weight[i]));
}

/// Column sums from which the gradients of weight, factors and scale are computed.
struct GroupSums {
  float* products;  // Σ over rows of dy x rstd
  float* squares;   // Σ over rows of x² rstd³ mean, mean = s Σ γ dy h / size
};

/// Computes dx = m rstd (s γ dy - h rstd² mean) (+ dresidual) of a group and adds to the column sums.
template <class T, class W>
void group_gradient(const T* dy, const T* x, const W* weight, const float* factors, float scale, float rstd,
                    const T* dresidual, T* dx, int64_t size, const GroupSums& sums) {
  // Summed as in rms_norm, so that factors of 1 give bitwise equal results.
  const float dot = row_sum(
      size,
      [=](int64_t i) {
        const Vector product = load_vector(dy + i) * load_vector(x + i);
        return (factors == nullptr ? product : product * load_vector(factors + i)) * load_vector(weight + i);
      },
      [=](int64_t i) { return load(dy[i]) * load(x[i]) * (factors == nullptr ? 1.0f : factors[i]) * load(weight[i]); });
  const float scaled_mean = scale * dot / static_cast<float>(size) * rstd * rstd;
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float m = factors == nullptr ? 1.0f : factors[i];
    const float from = load(x[i]), gradient = load(dy[i]);
    if (sums.products != nullptr) {
      sums.products[i] += gradient * from * rstd;
      sums.squares[i] += from * from * (rstd * scaled_mean);
    }
    const float dh = rstd * (scale * load(weight[i]) * gradient - m * from * scaled_mean);
    store(&dx[i], (dresidual == nullptr ? 0.0f : load(dresidual[i])) + m * dh);
  }
}

}  // namespace

void masked_rms_norm_forward(mimo_stream& stream, const mimo_masked_rms_norm_forward_args& args) {
  MIMO_REQUIRE(args.group_size > 0 && args.width % args.group_size == 0, "masked_rms_norm_forward");
  const bool residual = args.residual != nullptr;
  MIMO_REQUIRE(residual == (args.sum != nullptr), "masked_rms_norm_forward");
  MIMO_REQUIRE(residual || (args.x_factors == nullptr && args.x_scale == nullptr), "masked_rms_norm_forward");
  const MaskFactors of_x(&stream, args.x_factors, args.x_scale, residual ? args.width : 0);
  const int64_t size = args.group_size, groups = args.width / size;
  const float scale = args.scale == nullptr ? 1.0f : *args.scale;
  const int64_t runs = (args.rows + rows_per_partial - 1) / rows_per_partial;
  Workspace workspace(&stream, runs * size * static_cast<int64_t>(sizeof(float)));
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      parallel_range(stream.device->threads, args.rows, rows_per_partial, [&](int64_t begin, int64_t end) {
        float* const h = workspace.as<float>() + begin / rows_per_partial * size;
        for (int64_t index = begin * groups; index < end * groups; ++index) {
          const int64_t row = index / groups, column = index % groups * size;
          const T* x = static_cast<const T*>(args.x) + row * args.x_stride + column;
          if (residual) {
            T* const sum = static_cast<T*>(args.sum) + row * args.width + column;
            add_residual(x, of_x.product() + column,
                         static_cast<const T*>(args.residual) + row * args.x_stride + column, sum, size);
            x = sum;
          }
          masked_group(x, args.factors == nullptr ? nullptr : args.factors + column, h, size);
          const float squares = row_sum(
              size, [h](int64_t i) { return load_vector(h + i) * load_vector(h + i); },
              [h](int64_t i) { return h[i] * h[i]; });
          args.rstd[index] = 1.0f / std::sqrt(squares / static_cast<float>(size) + args.epsilon);
          scale_group(h, static_cast<const W*>(args.weight) + column, scale * args.rstd[index],
                      static_cast<T*>(args.y) + row * args.y_stride + column, size);
        }
      });
    });
  });
}

void masked_rms_norm_backward(mimo_stream& stream, const mimo_masked_rms_norm_backward_args& args) {
  MIMO_REQUIRE(args.group_size > 0 && args.width % args.group_size == 0, "masked_rms_norm_backward");
  const int64_t size = args.group_size, groups = args.width / size;
  const float scale = args.scale == nullptr ? 1.0f : *args.scale;
  const bool wanted = args.dweight != nullptr || args.dfactors != nullptr || args.dscale != nullptr;
  ColumnSums products(&stream, args.rows, args.width, wanted), squares(&stream, args.rows, args.width, wanted);
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      parallel_range(stream.device->threads, args.rows, rows_per_partial, [&](int64_t begin, int64_t end) {
        const GroupSums sums{products.cleared_partial(begin), squares.cleared_partial(begin)};
        for (int64_t index = begin * groups; index < end * groups; ++index) {
          const int64_t row = index / groups, column = index % groups * size;
          const int64_t at = row * args.dx_stride + column;
          group_gradient(static_cast<const T*>(args.dy) + row * args.dy_stride + column,
                         static_cast<const T*>(args.x) + row * args.x_stride + column,
                         static_cast<const W*>(args.weight) + column,
                         args.factors == nullptr ? nullptr : args.factors + column, scale, args.rstd[index],
                         args.dresidual == nullptr ? nullptr : static_cast<const T*>(args.dresidual) + at,
                         static_cast<T*>(args.dx) + at, size,
                         wanted ? GroupSums{sums.products + column, sums.squares + column} : GroupSums{});
        }
      });
      if (!wanted) return;
      const W* const weight = static_cast<const W*>(args.weight);
      const float* const product = products.total();
      const float* const square = squares.total();
      for (int64_t c = 0; c < args.width; ++c) {
        const float m = args.factors == nullptr ? 1.0f : args.factors[c], gamma = load(weight[c]);
        if (args.dweight != nullptr) args.dweight[c] += scale * m * product[c];
        if (args.dfactors != nullptr) args.dfactors[c] += scale * gamma * product[c] - m * square[c];
        if (args.dscale != nullptr) args.dscale[c] += gamma * m * product[c];
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
