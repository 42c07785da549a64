// Gates of outputs: y = x σ(gate), and y = x gate σ(gate).
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

template <class T, int Width>
__global__ void forward_kernel(mimo_gate_forward_args args, int64_t packs) {
  const bool silu = args.kind == MIMO_GATE_SILU;
  for_each_pack(args.rows, packs, [&](int64_t row, int64_t pack) {
    float x[Width], gate[Width];
    read(static_cast<const T*>(args.x) + row * args.x_stride + pack * Width, x);
    read(static_cast<const T*>(args.gate) + row * args.gate_stride + pack * Width, gate);
#pragma unroll
    for (int i = 0; i < Width; ++i) x[i] *= (silu ? gate[i] : 1.0f) * sigmoid(gate[i]);
    write(static_cast<T*>(args.y) + row * args.y_stride + pack * Width, x);
  });
}

template <class T, int Width>
__global__ void backward_kernel(mimo_gate_backward_args args, int64_t packs) {
  const bool silu = args.kind == MIMO_GATE_SILU;
  for_each_pack(args.rows, packs, [&](int64_t row, int64_t pack) {
    float dy[Width], x[Width], gate[Width];
    read(static_cast<const T*>(args.dy) + row * args.dy_stride + pack * Width, dy);
    read(static_cast<const T*>(args.x) + row * args.x_stride + pack * Width, x);
    read(static_cast<const T*>(args.gate) + row * args.gate_stride + pack * Width, gate);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const float g = gate[i], s = sigmoid(g);
      gate[i] = dy[i] * x[i] * s * (silu ? 1.0f + g * (1.0f - s) : 1.0f - s);
      x[i] = dy[i] * (silu ? g * s : s);
    }
    write(static_cast<T*>(args.dx) + row * args.dx_stride + pack * Width, x);
    write(static_cast<T*>(args.dgate) + row * args.dgate_stride + pack * Width, gate);
  });
}

}  // namespace

void gate_forward(mimo_stream& stream, const mimo_gate_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && (args.kind == MIMO_GATE_SIGMOID || args.kind == MIMO_GATE_SILU), "gate_forward");
  if (args.rows == 0 || args.width == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer, int64_t stride) { return packs_fit<T>(pointer, args.width, stride, wide); };
    with_width<wide>(fits(args.x, args.x_stride) && fits(args.gate, args.gate_stride) && fits(args.y, args.y_stride), [&](auto w) {
      const auto [grid, block] = cover(args.rows, args.width / w);
      launch(stream, forward_kernel<T, w>, grid, block, 0, args, args.width / w);
    });
  });
}

void gate_backward(mimo_stream& stream, const mimo_gate_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && (args.kind == MIMO_GATE_SIGMOID || args.kind == MIMO_GATE_SILU), "gate_backward");
  if (args.rows == 0 || args.width == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer, int64_t stride) { return packs_fit<T>(pointer, args.width, stride, wide); };
    const bool all = fits(args.dy, args.dy_stride) && fits(args.x, args.x_stride) && fits(args.gate, args.gate_stride) &&
                     fits(args.dx, args.dx_stride) && fits(args.dgate, args.dgate_stride);
    with_width<wide>(all, [&](auto w) {
      const auto [grid, block] = cover(args.rows, args.width / w);
      launch(stream, backward_kernel<T, w>, grid, block, 0, args, args.width / w);
    });
  });
}

}  // namespace mimo::cuda
