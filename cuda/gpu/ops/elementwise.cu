// Contiguous elementwise operations: add, fill, scale by a device scalar.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

template <class T, int Width>
__global__ void add_kernel(const T* a, const T* b, T* y, int64_t packs) {
  for_each_pack(1, packs, [&](int64_t, int64_t pack) {
    float left[Width], right[Width];
    read(a + pack * Width, left);
    read(b + pack * Width, right);
#pragma unroll
    for (int i = 0; i < Width; ++i) left[i] += right[i];
    write(y + pack * Width, left);
  });
}

template <class T>
__global__ void fill_kernel(T* y, int64_t elements, T value) {
  for_each_pack(1, elements, [&](int64_t, int64_t i) { y[i] = value; });
}

template <int Width>
__global__ void scale_kernel(float* x, const float* factor, int64_t packs) {
  const float by = *factor;
  if (by == 1) return;
  for_each_pack(1, packs, [&](int64_t, int64_t pack) {
    float value[Width];
    read(x + pack * Width, value);
#pragma unroll
    for (int i = 0; i < Width; ++i) value[i] *= by;
    write(x + pack * Width, value);
  });
}

template <class T>
void fill_with(mimo_stream& stream, const mimo_fill_args& args, T value) {
  const auto [grid, block] = cover(1, args.elements);
  launch(stream, fill_kernel<T>, grid, block, 0, static_cast<T*>(args.y), args.elements, value);
}

}  // namespace

void add(mimo_stream& stream, const mimo_add_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "add");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, args.elements, 0, wide); };
    with_width<wide>(fits(args.a) && fits(args.b) && fits(args.y), [&](auto w) {
      const auto [grid, block] = cover(1, args.elements / w);
      launch(stream, add_kernel<T, w>, grid, block, 0, static_cast<const T*>(args.a), static_cast<const T*>(args.b),
             static_cast<T*>(args.y), args.elements / w);
    });
  });
}

void fill(mimo_stream& stream, const mimo_fill_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "fill");
  switch (args.dtype) {
    case MIMO_DTYPE_F32:
      return fill_with(stream, args, static_cast<float>(args.value));
    case MIMO_DTYPE_BF16:
      return fill_with(stream, args, __float2bfloat16_rn(static_cast<float>(args.value)));
    case MIMO_DTYPE_I32:
      return fill_with(stream, args, static_cast<int32_t>(args.value));
    case MIMO_DTYPE_U8:
      return fill_with(stream, args, static_cast<uint8_t>(args.value));
    case MIMO_DTYPE_F64:
      return fill_with(stream, args, args.value);
    default:
      fail(MIMO_ERROR_ARGUMENT, "fill was given an unknown storage type.");
  }
}

void scale(mimo_stream& stream, const mimo_scale_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "scale");
  with_width<4>(packs_fit<float>(args.x, args.elements, 0, 4), [&](auto w) {
    const auto [grid, block] = cover(1, args.elements / w);
    launch(stream, scale_kernel<w>, grid, block, 0, args.x, args.factor, args.elements / w);
  });
}

}  // namespace mimo::cuda
