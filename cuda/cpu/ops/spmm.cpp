// Sparse (CSR) matrix times dense matrix: interpolation of position embeddings and row gathers (docs/spec/vision.md
// §1.4, §2.3, §2.4).
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

/// Columns summed at a time: the fp32 sums stay in the L1 cache.
constexpr int64_t columns_per_sum = 2048;

template <class X, class Y>
void product_row(const mimo_spmm_args& args, int64_t row) {
  const int64_t first = args.offsets[row], last = args.offsets[row + 1];
  if (first == last && args.accumulate) return;
  const X* x = static_cast<const X*>(args.x);
  Y* y = static_cast<Y*>(args.y) + row * args.y_stride;
  float sum[columns_per_sum];
  for (int64_t begin = 0; begin < args.width; begin += columns_per_sum) {
    const int64_t count = args.width - begin < columns_per_sum ? args.width - begin : columns_per_sum;
    if (args.accumulate) {
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) sum[c] = load(y[begin + c]);
    } else {
      std::memset(sum, 0, static_cast<size_t>(count) * sizeof(float));
    }
    for (int64_t i = first; i < last; ++i) {
      const float value = args.values == nullptr ? 1.0f : args.values[i];
      const X* from = x + args.columns[i] * args.x_stride + begin;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) sum[c] += value * load(from[c]);
    }
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) store(&y[begin + c], sum[c]);
  }
}

}  // namespace

void spmm(mimo_stream& stream, const mimo_spmm_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width > 0 && args.x_stride >= args.width && args.y_stride >= args.width, "spmm");
  with_dtype(args.x_dtype, [&](auto* x) {
    with_dtype(args.y_dtype, [&](auto* y) {
      using X = std::remove_pointer_t<decltype(x)>;
      using Y = std::remove_pointer_t<decltype(y)>;
      parallel_range(stream.device->threads, args.rows, 4096 / args.width + 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) product_row<X, Y>(args, row);
      });
    });
  });
}

}  // namespace mimo::MIMO_ISA
