// LayerNorm over rows: y = (x - mean) rstd γ + β with the biased variance; forward, with an optional residual sum, and
// backward.
#include "kernel.h"
#include "prefetch.h"
#include "streaming.h"

namespace mimo::MIMO_ISA {
namespace {

template <class T>
void add_residual(const T* x, const T* residual, T* sum, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) store(&sum[i], load(x[i]) + load(residual[i]));
}

template <class T, class W>
void normalise(const T* x, const W* weight, const W* bias, float mean, float rstd, T* y, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) store(&y[i], (load(x[i]) - mean) * rstd * load(weight[i]) + load(bias[i]));
}

/// Rows [begin, end), software-pipelined to keep memory busy: a row is summed while the squared deviations of the
/// previous one are, and the next is prefetched while results are written. One loop sums every row, so a sum does not
/// depend on neighbouring rows. The residual is added to a row before it is summed.
template <class T, class W>
void forward_rows(const mimo_layer_norm_forward_args& args, int64_t begin, int64_t end) {
  const float width = static_cast<float>(args.width);
  const auto row_in = [&](const void* rows, int64_t row) { return static_cast<const T*>(rows) + row * args.width; };
  const auto row_of = [&](int64_t row) { return row_in(args.residual == nullptr ? args.x : args.sum, row); };
  const auto add_row = [&](int64_t row) {
    if (args.residual == nullptr || row >= end) return;
    add_residual(row_in(args.x, row), row_in(args.residual, row), static_cast<T*>(args.sum) + row * args.width,
                 args.width);
  };
  const auto sums_of = [&](const T* next, const T* x, float mean) {
    return sums_over(args.width, [next, x, mean](int64_t i, float& sum, float& square) {
      const float centred = load(x[i]) - mean;
      sum = load(next[i]);
      square = centred * centred;
    });
  };
  const auto *weight = static_cast<const W*>(args.weight), *bias = static_cast<const W*>(args.bias);
  const bool streamed = is_streamed(args.rows * args.width, sizeof(T));
  add_row(begin);
  float sum = sums_of(row_of(begin), row_of(begin), 0).first;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = row_of(row);
    const float mean = sum / width;
    add_row(row + 1);
    const Sums sums = sums_of(row + 1 < end ? row_of(row + 1) : x, x, mean);
    const float rstd = 1.0f / std::sqrt(sums.second / width + args.epsilon);
    args.mean[row] = mean;
    args.rstd[row] = rstd;
    if (row + 2 < end) prefetch(row_in(args.x, row + 2), args.width);
    if (args.residual != nullptr && row + 2 < end) prefetch(row_in(args.residual, row + 2), args.width);
    write_row(streamed, static_cast<T*>(args.y) + row * args.width, args.width, [&](T* to, int64_t from, int64_t past) {
      normalise(x + from, weight + from, bias + from, mean, rstd, to, past - from);
    });
    sum = sums.first;
  }
  finish_streaming(streamed);
}

/// With n = (x - mean) rstd and g = γ dy: dx = rstd (g - mean(g) - n mean(g n)) (+ dresidual).
template <bool with_residual, class T, class W>
void input_gradient(const T* dy, const T* x, const W* weight, const T* dresidual, T* dx, int64_t width, float mean,
                    float rstd, Sums means) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const float n = (load(x[i]) - mean) * rstd;
    const float gradient = rstd * (load(dy[i]) * load(weight[i]) - means.first - n * means.second);
    store(&dx[i], with_residual ? load(dresidual[i]) + gradient : gradient);
  }
}

/// Returns Σ g and Σ g n of one row; dweight += dy n and dbias += dy unless null.
template <class T, class W>
Sums gradient_sums(const T* dy, const T* x, const W* weight, float mean, float rstd, int64_t width, float* dweight,
                   float* dbias) {
  if (dweight == nullptr) {
    return sums_over(width, [dy, x, weight, mean, rstd](int64_t i, float& g, float& gn) {
      g = load(dy[i]) * load(weight[i]);
      gn = g * ((load(x[i]) - mean) * rstd);
    });
  }
  return sums_over(width, [dy, x, weight, mean, rstd, dweight, dbias](int64_t i, float& g, float& gn) {
    const float n = (load(x[i]) - mean) * rstd;
    dbias[i] += load(dy[i]);
    dweight[i] += load(dy[i]) * n;
    g = load(dy[i]) * load(weight[i]);
    gn = g * n;
  });
}

/// Rows [begin, end), at most 32, of one partial sum of dweight and dbias (both may be null).
template <class T, class W>
void backward_rows(const mimo_layer_norm_backward_args& args, int64_t begin, int64_t end, float* dweight,
                   float* dbias) {
  const W* weight = static_cast<const W*>(args.weight);
  const bool streamed = is_streamed(args.rows * args.width, sizeof(T));
  const float width = static_cast<float>(args.width);
  Sums means[32];
  for (int64_t row = begin; row < end; ++row) {
    const T* dy = static_cast<const T*>(args.dy) + row * args.width;
    const T* x = static_cast<const T*>(args.x) + row * args.width;
    const Sums sums = gradient_sums(dy, x, weight, args.mean[row], args.rstd[row], args.width, dweight, dbias);
    means[row - begin] = {sums.first / width, sums.second / width};
  }
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * args.width;
    const auto gradient = args.dresidual ? input_gradient<true, T, W> : input_gradient<false, T, W>;
    const T *dy = static_cast<const T*>(args.dy) + offset, *x = static_cast<const T*>(args.x) + offset;
    const T* dresidual = args.dresidual ? static_cast<const T*>(args.dresidual) + offset : nullptr;
    write_row(streamed, static_cast<T*>(args.dx) + offset, args.width, [&](T* to, int64_t from, int64_t past) {
      gradient(dy + from, x + from, weight + from, dresidual ? dresidual + from : nullptr, to, past - from,
               args.mean[row], args.rstd[row], means[row - begin]);
    });
  }
  finish_streaming(streamed);
}

/// Calls body(begin, end) for runs of few rows.
template <class Body>
void in_batches(int64_t begin, int64_t end, int64_t width, Body&& body) {
  const int64_t batch = rows_per_batch(width);
  for (int64_t row = begin; row < end; row += batch) body(row, row + batch < end ? row + batch : end);
}

}  // namespace

void layer_norm_forward(mimo_stream& stream, const mimo_layer_norm_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width > 0, "layer_norm_forward");
  MIMO_REQUIRE((args.residual == nullptr) == (args.sum == nullptr), "layer_norm_forward");
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      parallel_range(stream.device->threads, args.rows, rows_per_partial, [&](int64_t begin, int64_t end) {
        forward_rows<T, W>(args, begin, end);
      });
    });
  });
}

void layer_norm_backward(mimo_stream& stream, const mimo_layer_norm_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width > 0, "layer_norm_backward");
  const bool sums = args.dweight != nullptr || args.dbias != nullptr;
  const int64_t partials = (args.rows + rows_per_partial - 1) / rows_per_partial;
  const int64_t partial_elements = sums ? partials * args.width : 0;
  Workspace workspace(&stream, 2 * partial_elements * static_cast<int64_t>(sizeof(float)));
  float* const dweights = workspace.as<float>();
  float* const dbiases = dweights + partial_elements;
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      parallel_range(stream.device->threads, args.rows, rows_per_partial, [&](int64_t begin, int64_t end) {
        float* dweight = sums ? dweights + begin / rows_per_partial * args.width : nullptr;
        float* dbias = sums ? dbiases + begin / rows_per_partial * args.width : nullptr;
        if (sums) {
          std::memset(dweight, 0, static_cast<size_t>(args.width) * sizeof(float));
          std::memset(dbias, 0, static_cast<size_t>(args.width) * sizeof(float));
        }
        in_batches(begin, end, args.width,
                   [&](int64_t first, int64_t last) { backward_rows<T, W>(args, first, last, dweight, dbias); });
      });
    });
  });
  if (args.dweight) add_partials(stream, dweights, partials, args.width, args.dweight);
  if (args.dbias) add_partials(stream, dbiases, partials, args.width, args.dbias);
}

}  // namespace mimo::MIMO_ISA
