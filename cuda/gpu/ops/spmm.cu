// Sparse (CSR) matrix times dense matrix: interpolation of position embeddings and row gathers (docs/spec/vision.md
// §1.4, §2.3, §2.4).
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

template <class X, class Y, int Width>
__global__ void spmm_kernel(mimo_spmm_args args, int64_t packs) {
  for_each_pack(args.rows, packs, [&](int64_t row, int64_t pack) {
    const int64_t first = args.offsets[row], last = args.offsets[row + 1];
    if (first == last && args.accumulate) return;
    const X* x = static_cast<const X*>(args.x) + pack * Width;
    Y* y = static_cast<Y*>(args.y) + row * args.y_stride + pack * Width;
    float sum[Width] = {};
    if (args.accumulate) read(y, sum);
    for (int64_t i = first; i < last; ++i) {
      const float factor = args.values == nullptr ? 1.0f : args.values[i];
      float value[Width];
      read(x + args.columns[i] * args.x_stride, value);
#pragma unroll
      for (int c = 0; c < Width; ++c) sum[c] += factor * value[c];
    }
    write(y, sum);
  });
}

}  // namespace

void spmm(mimo_stream& stream, const mimo_spmm_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width > 0 && args.x_stride >= args.width && args.y_stride >= args.width, "spmm");
  if (args.rows == 0) return;
  with_dtype(args.x_dtype, [&](auto* tx) {
    with_dtype(args.y_dtype, [&](auto* ty) {
      using X = std::remove_pointer_t<decltype(tx)>;
      using Y = std::remove_pointer_t<decltype(ty)>;
      constexpr int wide = sizeof(X) < sizeof(Y) ? vector_width<X> : vector_width<Y>;
      const bool fits =
          packs_fit<X>(args.x, args.width, args.x_stride, wide) && packs_fit<Y>(args.y, args.width, args.y_stride, wide);
      with_width<wide>(fits, [&](auto w) {
        const auto [grid, block] = cover(args.rows, args.width / w);
        launch(stream, spmm_kernel<X, Y, w>, grid, block, 0, args, args.width / w);
      });
    });
  });
}

}  // namespace mimo::cuda
