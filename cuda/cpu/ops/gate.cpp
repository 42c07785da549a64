// Gates of outputs: y = x σ(gate), and y = x gate σ(gate).
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t rows_per_run = 16;

/// Calls body(row) for every row, shared out.
template <class Body>
void for_rows(mimo_stream& stream, int64_t rows, Body&& body) {
  parallel_range(stream.device->threads, rows, rows_per_run, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

}  // namespace

void gate_forward(mimo_stream& stream, const mimo_gate_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && (args.kind == MIMO_GATE_SIGMOID || args.kind == MIMO_GATE_SILU), "gate_forward");
  const bool silu = args.kind == MIMO_GATE_SILU;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    for_rows(stream, args.rows, [&](int64_t row) {
      const T* const x = static_cast<const T*>(args.x) + row * args.x_stride;
      const T* const gate = static_cast<const T*>(args.gate) + row * args.gate_stride;
      T* const y = static_cast<T*>(args.y) + row * args.y_stride;
#pragma omp simd
      for (int64_t c = 0; c < args.width; ++c) {
        const float g = load(gate[c]), s = sigmoid(g);
        store(&y[c], load(x[c]) * (silu ? g * s : s));
      }
    });
  });
}

void gate_backward(mimo_stream& stream, const mimo_gate_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && (args.kind == MIMO_GATE_SIGMOID || args.kind == MIMO_GATE_SILU), "gate_backward");
  const bool silu = args.kind == MIMO_GATE_SILU;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    for_rows(stream, args.rows, [&](int64_t row) {
      const T* const dy = static_cast<const T*>(args.dy) + row * args.dy_stride;
      const T* const x = static_cast<const T*>(args.x) + row * args.x_stride;
      const T* const gate = static_cast<const T*>(args.gate) + row * args.gate_stride;
      T* const dx = static_cast<T*>(args.dx) + row * args.dx_stride;
      T* const dgate = static_cast<T*>(args.dgate) + row * args.dgate_stride;
#pragma omp simd
      for (int64_t c = 0; c < args.width; ++c) {
        const float d = load(dy[c]), value = load(x[c]), g = load(gate[c]), s = sigmoid(g);
        store(&dx[c], d * (silu ? g * s : s));
        store(&dgate[c], d * value * s * (silu ? 1.0f + g * (1.0f - s) : 1.0f - s));
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
