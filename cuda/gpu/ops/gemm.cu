// Dense GEMM through cuBLASLt, and the cases that it does not cover: operands of different types have kernels of their
// own (mixed_gemm.h) or are widened to fp32; a bf16 result of fp32 operands, and a bias of another type than the
// result, take an extra pass.
#include "cublaslt.h"
#include "kernel.cuh"
#include "mixed_gemm.h"
#include "operations.h"

namespace mimo::cuda {
namespace {

/// c = product + beta c + bias; product may alias c, or be null for 0.
template <class P, class C, class B>
__global__ void finish_kernel(const P* product, int64_t product_stride, int64_t product_batch_stride, const B* bias,
                              C* c, int64_t c_stride, int64_t c_batch_stride, int64_t m, int64_t n, int64_t batch,
                              float beta) {
  for_each_pack(batch * m, n, [&](int64_t row, int64_t column) {
    C* to = c + row / m * c_batch_stride + row % m * c_stride + column;
    float value = product != nullptr
                      ? load(product + row / m * product_batch_stride + row % m * product_stride + column)
                      : 0.0f;
    if (beta != 0) value += beta * load(to);
    if (bias != nullptr) value += load(bias + column);
    store(to, value);
  });
}

/// Applies beta and bias in a separate pass. `product` is fp32 or null, or is c itself (in_place).
void finish(mimo_stream& stream, const mimo_gemm_args& args, const float* product, bool in_place, float beta) {
  with_dtype(args.c_dtype, [&](auto* tc) {
    with_dtype(args.b_dtype, [&](auto* tb) {
      using C = std::remove_pointer_t<decltype(tc)>;
      using B = std::remove_pointer_t<decltype(tb)>;
      const Cover covered = cover(args.batch * args.m, args.n);
      C* const c = static_cast<C*>(args.c);
      const B* const bias = static_cast<const B*>(args.bias);
      if (in_place) {
        launch(stream, finish_kernel<C, C, B>, covered.grid, covered.block, 0, c, args.c_stride, args.c_batch_stride,
               bias, c, args.c_stride, args.c_batch_stride, args.m, args.n, args.batch, beta);
      } else {
        launch(stream, finish_kernel<float, C, B>, covered.grid, covered.block, 0, product, args.n, args.m * args.n,
               bias, c, args.c_stride, args.c_batch_stride, args.m, args.n, args.batch, beta);
      }
    });
  });
}

/// Returns an operand as fp32: unchanged, or a contiguous copy in `buffer`, whose strides are then set.
const void* widen(mimo_stream& stream, const void* from, int32_t dtype, int64_t rows, int64_t width, int64_t batch,
                  const Workspace& buffer, int64_t* stride, int64_t* batch_stride) {
  if (dtype == MIMO_DTYPE_F32) return from;
  const int64_t distinct = *batch_stride == 0 ? 1 : batch;
  for (int64_t i = 0; i < distinct; ++i) {
    mimo_axpby_args copy{};
    copy.x = static_cast<const bf16*>(from) + i * *batch_stride;
    copy.y = buffer.as<float>() + i * rows * width;
    copy.rows = rows;
    copy.width = width;
    copy.x_stride = *stride;
    copy.y_stride = width;
    copy.alpha = 1.0f;
    copy.x_dtype = MIMO_DTYPE_BF16;
    copy.y_dtype = MIMO_DTYPE_F32;
    axpby(stream, copy);
  }
  *stride = width;
  *batch_stride = *batch_stride == 0 ? 0 : rows * width;
  return buffer.as<float>();
}

}  // namespace

void gemm(mimo_stream& stream, const mimo_gemm_args& args) {
  MIMO_REQUIRE(args.m >= 0 && args.n >= 0 && args.k >= 0 && args.batch >= 0, "gemm");
  MIMO_REQUIRE(args.batch <= 1 || args.c_batch_stride != 0, "gemm");
  MIMO_REQUIRE(args.m <= 1 || args.c_stride >= args.n, "gemm");
  MIMO_REQUIRE((args.transpose_a ? args.k : args.m) <= 1 || args.a_stride >= (args.transpose_a ? args.m : args.k),
               "gemm");
  MIMO_REQUIRE((args.transpose_b ? args.n : args.k) <= 1 || args.b_stride >= (args.transpose_b ? args.k : args.n),
               "gemm");
  if (args.m == 0 || args.n == 0 || args.batch == 0) return;
  if (args.k == 0) return finish(stream, args, nullptr, false, args.beta);
  if (mixed_gemm_fits(args)) return sm80_mixed_gemm(stream, args);

  const bool mixed = args.a_dtype != args.b_dtype;
  const auto copy_bytes = [&](int32_t dtype, int64_t elements, int64_t batch_stride) {
    return mixed && dtype == MIMO_DTYPE_BF16 ? (batch_stride == 0 ? 1 : args.batch) * elements * 4 : 0;
  };
  Workspace a_copy(&stream, copy_bytes(args.a_dtype, args.m * args.k, args.a_batch_stride));
  Workspace b_copy(&stream, copy_bytes(args.b_dtype, args.k * args.n, args.b_batch_stride));
  DenseProduct p{};
  p.a = args.a, p.b = args.b, p.c = args.c;
  p.m = args.m, p.n = args.n, p.k = args.k;
  p.a_stride = args.a_stride, p.b_stride = args.b_stride, p.c_stride = args.c_stride;
  p.batch = args.batch;
  p.a_batch_stride = args.a_batch_stride, p.b_batch_stride = args.b_batch_stride;
  p.c_batch_stride = args.c_batch_stride;
  p.alpha = args.alpha, p.beta = args.beta;
  p.transpose_a = args.transpose_a != 0, p.transpose_b = args.transpose_b != 0;
  p.dtype = mixed ? MIMO_DTYPE_F32 : args.a_dtype;
  p.c_dtype = args.c_dtype;
  p.beside_collective = args.beside_collective != 0;
  if (mixed) {
    p.a = widen(stream, args.a, args.a_dtype, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.batch, a_copy,
                &p.a_stride, &p.a_batch_stride);
    p.b = widen(stream, args.b, args.b_dtype, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.batch, b_copy,
                &p.b_stride, &p.b_batch_stride);
  }
  // fp32 operands with a bf16 result: computed into an fp32 buffer.
  const bool aside = p.dtype == MIMO_DTYPE_F32 && args.c_dtype == MIMO_DTYPE_BF16;
  Workspace result(&stream, aside ? args.batch * args.m * args.n * 4 : 0);
  if (aside) {
    p.c = result.as<float>();
    p.c_stride = args.n;
    p.c_batch_stride = args.m * args.n;
    p.c_dtype = MIMO_DTYPE_F32;
    p.beta = 0;
  }
  const bool bias_inside = args.bias != nullptr && !aside && args.b_dtype == args.c_dtype;
  p.bias = bias_inside ? args.bias : nullptr;
  stream.device->cublaslt().multiply(stream, p);
  if (aside) return finish(stream, args, result.as<float>(), false, args.beta);
  if (args.bias != nullptr && !bias_inside) finish(stream, args, nullptr, true, 0.0f);
}

}  // namespace mimo::cuda
