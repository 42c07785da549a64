// y = alpha x + beta y for any mix of f32 and bf16, contiguous or strided: copies, casts, gradient accumulation.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

template <class X, class Y, int Width>
__global__ void axpby_kernel(const X* x, Y* y, const int32_t* row_count, int64_t rows, int64_t packs, int64_t x_stride,
                             int64_t y_stride, float alpha, float beta) {
  for_each_pack(live_rows(rows, row_count), packs, [&](int64_t row, int64_t pack) {
    float value[Width] = {}, before[Width] = {};
    if (alpha != 0) read(x + row * x_stride + pack * Width, value);
    if (beta != 0) read(y + row * y_stride + pack * Width, before);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      // A factor of 0 must not turn infinities of its operand into NaN.
      const float scaled = alpha != 0 ? alpha * value[i] : 0.0f;
      value[i] = beta != 0 ? scaled + beta * before[i] : scaled;
    }
    write(y + row * y_stride + pack * Width, value);
  });
}

}  // namespace

void axpby(mimo_stream& stream, const mimo_axpby_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "axpby");
  if (args.rows == 0 || args.width == 0) return;
  int64_t rows = args.rows, width = args.width;
  const bool flat = args.row_count == nullptr && (rows == 1 || (args.x_stride == width && args.y_stride == width));
  if (flat) {
    width *= rows;
    rows = 1;
  }
  with_dtype(args.x_dtype, [&](auto* tx) {
    with_dtype(args.y_dtype, [&](auto* ty) {
      using X = std::remove_pointer_t<decltype(tx)>;
      using Y = std::remove_pointer_t<decltype(ty)>;
      constexpr int wide = sizeof(X) < sizeof(Y) ? vector_width<X> : vector_width<Y>;
      const int64_t x_stride = flat ? 0 : args.x_stride, y_stride = flat ? 0 : args.y_stride;
      with_width<wide>(packs_fit<X>(args.x, width, x_stride, wide) && packs_fit<Y>(args.y, width, y_stride, wide),
                       [&](auto w) {
                         const auto [grid, block] = cover(rows, width / w);
                         launch(stream, axpby_kernel<X, Y, w>, grid, block, 0, static_cast<const X*>(args.x),
                                static_cast<Y*>(args.y), args.row_count, rows, width / w, x_stride, y_stride,
                                args.alpha, args.beta);
                       });
    });
  });
}

}  // namespace mimo::cuda
