// Decomposes a GEMM with GELU into product and activation: the arguments that both libraries pass on.
#pragma once
#include <cmath>

#include "mimo.h"

namespace mimo {

/// z = x wᵀ + bias.
inline mimo_gemm_args product_of(const mimo_gelu_gemm_forward_args& args) {
  mimo_gemm_args product{};
  product.a = args.x, product.b = args.w, product.c = args.z, product.bias = args.bias;
  product.m = args.rows, product.n = args.outputs, product.k = args.inputs;
  product.a_stride = args.x_stride, product.b_stride = args.inputs, product.c_stride = args.outputs;
  product.batch = 1, product.alpha = 1, product.transpose_b = 1;
  product.a_dtype = product.b_dtype = product.c_dtype = args.dtype;
  return product;
}

/// dx = dy w, written to dz.
inline mimo_gemm_args product_of(const mimo_gelu_gemm_backward_args& args) {
  mimo_gemm_args product{};
  product.a = args.dy, product.b = args.w, product.c = args.dz;
  product.m = args.rows, product.n = args.inputs, product.k = args.outputs;
  product.a_stride = args.dy_stride, product.b_stride = args.inputs, product.c_stride = args.inputs;
  product.batch = 1, product.alpha = 1;
  product.a_dtype = product.b_dtype = product.c_dtype = args.dtype;
  return product;
}

inline mimo_activation_forward_args activation_of(const mimo_gelu_gemm_forward_args& args) {
  mimo_activation_forward_args gelu{};
  gelu.x = args.z, gelu.y = args.y, gelu.rows = args.rows, gelu.width = args.outputs;
  gelu.clamp = INFINITY, gelu.kind = MIMO_ACTIVATION_GELU_TANH, gelu.dtype = args.dtype;
  return gelu;
}

/// GELU gradient applied to dz in place.
inline mimo_activation_backward_args activation_of(const mimo_gelu_gemm_backward_args& args) {
  mimo_activation_backward_args gelu{};
  gelu.dy = args.dz, gelu.x = args.z, gelu.dx = args.dz, gelu.rows = args.rows, gelu.width = args.inputs;
  gelu.clamp = INFINITY, gelu.kind = MIMO_ACTIVATION_GELU_TANH, gelu.dtype = args.dtype;
  return gelu;
}

}  // namespace mimo
