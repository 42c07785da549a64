// Contiguous elementwise operations: add, fill, scale by a device scalar.
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t elements_per_run = 16384;

template <class T>
void fill_with(mimo_stream& stream, void* y, int64_t elements, T value) {
  T* out = static_cast<T*>(y);
  parallel_range(stream.device->threads, elements, elements_per_run, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) out[i] = value;
  });
}

}  // namespace

void add(mimo_stream& stream, const mimo_add_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "add");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* a = static_cast<const T*>(args.a);
    const T* b = static_cast<const T*>(args.b);
    T* y = static_cast<T*>(args.y);
    parallel_range(stream.device->threads, args.elements, elements_per_run, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) store(&y[i], load(a[i]) + load(b[i]));
    });
  });
}

void fill(mimo_stream& stream, const mimo_fill_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "fill");
  switch (args.dtype) {
    case MIMO_DTYPE_F32:
      return fill_with(stream, args.y, args.elements, static_cast<float>(args.value));
    case MIMO_DTYPE_BF16: {
      bf16 value;
      store(&value, static_cast<float>(args.value));
      return fill_with(stream, args.y, args.elements, value);
    }
    case MIMO_DTYPE_I32:
      return fill_with(stream, args.y, args.elements, static_cast<int32_t>(args.value));
    case MIMO_DTYPE_U8:
      return fill_with(stream, args.y, args.elements, static_cast<uint8_t>(args.value));
    case MIMO_DTYPE_F64:
      return fill_with(stream, args.y, args.elements, args.value);
    default:
      fail(MIMO_ERROR_ARGUMENT, "fill was given an unknown storage type.");
  }
}

void scale(mimo_stream& stream, const mimo_scale_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "scale");
  const float factor = args.factor[0];
  if (factor == 1) return;
  parallel_range(stream.device->threads, args.elements, elements_per_run, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) args.x[i] *= factor;
  });
}

}  // namespace mimo::MIMO_ISA
