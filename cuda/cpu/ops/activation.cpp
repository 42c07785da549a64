// Activations of feed-forward layers and experts: y = p act(x) with the routing probability p of a row (1 for dense
// layers) (docs/spec/language-model.md §4.1, docs/spec/moe-performance.md §1.2, §1.3).
#include "activation.h"

namespace mimo::MIMO_ISA {
namespace {

/// Calls body(row, probability) for the valid rows on the pool's threads.
template <class Args, class Body>
void each_row(mimo_stream& stream, const Args& args, Body&& body) {
  parallel_range(stream.device->threads, live_rows(args.rows, args.row_count), rows_per_partial,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     body(row, args.row_probability ? args.row_probability[row] : 1.0f);
                   }
                 });
}

}  // namespace

void activation_forward(mimo_stream& stream, const mimo_activation_forward_args& args) {
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_activation(args, [&](const auto& activation) {
      each_row(stream, args, [&](int64_t row, float probability) {
        activation.forward(static_cast<const T*>(args.x) + row * activation.x_width(), probability,
                           static_cast<T*>(args.y) + row * args.width);
      });
    });
  });
}

void activation_backward(mimo_stream& stream, const mimo_activation_backward_args& args) {
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_activation(args, [&](const auto& activation) {
      each_row(stream, args, [&](int64_t row, float probability) {
        const int64_t x = row * activation.x_width();
        const float dprobability =
            activation.backward(static_cast<const T*>(args.dy) + row * args.width, static_cast<const T*>(args.x) + x,
                                probability, static_cast<T*>(args.dx) + x);
        if (args.drow_probability) args.drow_probability[row] = dprobability;
      });
    });
  });
}

}  // namespace mimo::MIMO_ISA
