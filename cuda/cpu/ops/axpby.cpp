// y = alpha x + beta y for any mix of f32 and bf16, contiguous or strided: copies, casts, gradient accumulation.
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

// Small enough for a run to stay in a core's L1 and L2 caches, large enough to amortise its scheduling.
constexpr int64_t elements_per_run = 16384;

template <class X, class Y>
void run(const X* x, Y* y, int64_t count, float alpha, float beta) {
  if (alpha == 0) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store(&y[i], beta == 0 ? 0.0f : beta * load(y[i]));
  } else if (beta == 0) {
    if (std::is_same_v<X, Y> && alpha == 1) {
      std::memmove(y, x, static_cast<size_t>(count) * sizeof(Y));
      return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store(&y[i], alpha * load(x[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store(&y[i], alpha * load(x[i]) + beta * load(y[i]));
  }
}

}  // namespace

void axpby(mimo_stream& stream, const mimo_axpby_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "axpby");
  const int64_t rows = live_rows(args.rows, args.row_count);
  if (rows == 0 || args.width == 0) return;
  const bool contiguous = rows == 1 || (args.x_stride == args.width && args.y_stride == args.width);
  with_dtype(args.x_dtype, [&](auto* tx) {
    with_dtype(args.y_dtype, [&](auto* ty) {
      using X = std::remove_pointer_t<decltype(tx)>;
      using Y = std::remove_pointer_t<decltype(ty)>;
      const X* x = static_cast<const X*>(args.x);
      Y* y = static_cast<Y*>(args.y);
      if (contiguous) {
        parallel_range(stream.device->threads, rows * args.width, elements_per_run, [&](int64_t begin, int64_t end) {
          run(x + begin, y + begin, end - begin, args.alpha, args.beta);
        });
      } else {
        const int64_t grain = elements_per_run / args.width + 1;
        parallel_range(stream.device->threads, rows, grain, [&](int64_t begin, int64_t end) {
          for (int64_t r = begin; r < end; ++r)
            run(x + r * args.x_stride, y + r * args.y_stride, args.width, args.alpha, args.beta);
        });
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
