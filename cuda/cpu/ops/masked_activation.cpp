// Activations of masked columns (docs/spec/elastic.md §9): y = p act(s m x). A row is masked in fp32 before its
// activation.
#include "activation.h"
#include "masks.h"

namespace mimo::MIMO_ISA {
namespace {

/// Calls body(row, probability, partial, masked) for the valid rows; `masked` has room for `lines` fp32 rows.
template <class Args, class Body>
void each_row(mimo_stream& stream, const Args& args, int64_t lines, int64_t x_width, Body&& body) {
  const int64_t rows = live_rows(args.rows, args.row_count);
  const int64_t runs = (rows + rows_per_partial - 1) / rows_per_partial;
  Workspace workspace(&stream, runs * lines * x_width * static_cast<int64_t>(sizeof(float)));
  parallel_range(stream.device->threads, rows, rows_per_partial, [&](int64_t begin, int64_t end) {
    float* const masked = workspace.as<float>() + begin / rows_per_partial * lines * x_width;
    for (int64_t row = begin; row < end; ++row) {
      body(row, args.row_probability ? args.row_probability[row] : 1.0f, masked);
    }
  });
}

template <class T>
void mask_row(const T* x, const float* factors, float* masked, int64_t width) {
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) masked[c] = factors[c] * load(x[c]);
}

}  // namespace

void masked_activation_forward(mimo_stream& stream, const mimo_masked_activation_forward_args& args) {
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_activation(args, [&](const auto& activation) {
      const int64_t x_width = activation.x_width();
      const MaskFactors masks(&stream, args.factors, args.scale, x_width);
      each_row(stream, args, 1, x_width, [&](int64_t row, float probability, float* masked) {
        mask_row(static_cast<const T*>(args.x) + row * x_width, masks.product(), masked, x_width);
        activation.forward(masked, probability, static_cast<T*>(args.y) + row * args.width);
      });
    });
  });
}

void masked_activation_backward(mimo_stream& stream, const mimo_masked_activation_backward_args& args) {
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_activation(args, [&](const auto& activation) {
      const int64_t x_width = activation.x_width();
      const bool wanted = args.dfactors != nullptr || args.dscale != nullptr;
      const MaskFactors masks(&stream, args.factors, args.scale, x_width);
      ColumnSums sums(&stream, live_rows(args.rows, args.row_count), x_width, wanted);
      each_row(stream, args, 2, x_width, [&](int64_t row, float probability, float* masked) {
        const T* const x = static_cast<const T*>(args.x) + row * x_width;
        float* const gradient = masked + x_width;
        mask_row(x, masks.product(), masked, x_width);
        const float dprobability =
            activation.backward(static_cast<const T*>(args.dy) + row * args.width, masked, probability, gradient);
        if (args.drow_probability) args.drow_probability[row] = dprobability;
        if (wanted) {
          float* const own = row % rows_per_partial == 0 ? sums.cleared_partial(row) : sums.partial(row);
#pragma omp simd
          for (int64_t c = 0; c < x_width; ++c) own[c] += gradient[c] * load(x[c]);
        }
        T* const dx = static_cast<T*>(args.dx) + row * x_width;
        const float* const product = masks.product();
#pragma omp simd
        for (int64_t c = 0; c < x_width; ++c) store(&dx[c], product[c] * gradient[c]);
      });
      if (wanted) masks.add_gradients(sums.total(), args.dfactors, args.dscale);
    });
  });
}

}  // namespace mimo::MIMO_ISA
