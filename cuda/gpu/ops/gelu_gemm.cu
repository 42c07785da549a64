// GEMM followed by tanh-GELU, or preceded by its gradient. In bf16 cuBLASLt applies it in the epilogue, which saves
// reading the activation (writing its gradient) again; otherwise it is a separate pass.
#include "gelu_gemm.h"

#include "cublaslt.h"
#include "kernel.cuh"
#include "operations.h"

namespace mimo::cuda {
namespace {

/// Multiplies with the epilogue, which reads or writes `beside` next to the result. Returns whether cuBLASLt supports
/// it.
bool multiply(mimo_stream& stream, const mimo_gemm_args& args, Epilogue epilogue, void* beside, void* result) {
  const auto lies = [&](const void* pointer) { return packs_fit<bf16>(pointer, args.n, args.n, vector_width<bf16>); };
  if (args.c_dtype != MIMO_DTYPE_BF16 || !lies(beside) || !lies(result)) return false;
  DenseProduct p{};
  p.a = args.a, p.b = args.b, p.c = result, p.bias = args.bias, p.beside = beside, p.epilogue = epilogue;
  p.m = args.m, p.n = args.n, p.k = args.k;
  p.a_stride = args.a_stride, p.b_stride = args.b_stride, p.c_stride = args.c_stride;
  p.batch = 1, p.alpha = 1;
  p.transpose_b = args.transpose_b != 0;
  p.dtype = args.a_dtype, p.c_dtype = args.c_dtype;
  return stream.device->cublaslt().multiply(stream, p);
}

}  // namespace

void gelu_gemm_forward(mimo_stream& stream, const mimo_gelu_gemm_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.inputs > 0 && args.outputs > 0, "gelu_gemm_forward");
  if (args.rows == 0) return;
  const mimo_gemm_args product = product_of(args);
  if (args.bias != nullptr && multiply(stream, product, Epilogue::gelu, args.z, args.y)) return;
  gemm(stream, product);
  activation_forward(stream, activation_of(args));
}

void gelu_gemm_backward(mimo_stream& stream, const mimo_gelu_gemm_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.inputs > 0 && args.outputs > 0, "gelu_gemm_backward");
  if (args.rows == 0) return;
  const mimo_gemm_args product = product_of(args);
  if (multiply(stream, product, Epilogue::gelu_gradient, const_cast<void*>(args.z), args.dz)) return;
  gemm(stream, product);
  activation_backward(stream, activation_of(args));
}

}  // namespace mimo::cuda
