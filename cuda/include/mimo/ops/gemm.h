/* Dense matrix products, plain and fused with GELU. */
#pragma once

#include "../stream.h"

/* c = alpha * op(a) op(b) + beta * c + bias. op(a) is [m, k], op(b) is [k, n]; a transposed operand is stored as [k, m] or
 * [n, k]. `batch` such products: batch strides count elements between consecutive matrices, 0 for a shared operand. */
typedef struct mimo_gemm_args {
  const void* a;
  const void* b;
  void* c;          /* [m, n]; not read where beta is 0 */
  const void* bias; /* [n], in b_dtype; or null */
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t a_stride;
  int64_t b_stride;
  int64_t c_stride;
  int64_t batch;
  int64_t a_batch_stride;
  int64_t b_batch_stride;
  int64_t c_batch_stride;
  float alpha;
  float beta;
  int32_t transpose_a;
  int32_t transpose_b;
  int32_t a_dtype; /* f32 or bf16, each of the three */
  int32_t b_dtype;
  int32_t c_dtype;
  int32_t beside_collective; /* 1: a collective runs concurrently; a GPU leaves some of its SMs to it */
} mimo_gemm_args;
MIMO_API int32_t mimo_gemm(mimo_stream* stream, const mimo_gemm_args* args);

/* z = x wᵀ + bias and y = GELU(z), GELU by tanh (MIMO_ACTIVATION_GELU_TANH). z is rounded to `dtype`; y is the GELU of the
 * rounded z or, on GPUs whose vendor library fuses both, of z before rounding. */
typedef struct mimo_gelu_gemm_forward_args {
  const void* x;    /* [rows, inputs] */
  const void* w;    /* [outputs, inputs] */
  const void* bias; /* [outputs], or null */
  void* z;          /* [rows, outputs] */
  void* y;          /* [rows, outputs] */
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  int64_t x_stride;
  int32_t dtype; /* of all tensors: f32 or bf16 */
} mimo_gelu_gemm_forward_args;
MIMO_API int32_t mimo_gelu_gemm_forward(mimo_stream* stream, const mimo_gelu_gemm_forward_args* args);

/* The gradient of z where dy is that of y = GELU(z) wᵀ: dz = GELU'(z) * (dy w), elementwise. */
typedef struct mimo_gelu_gemm_backward_args {
  const void* dy; /* [rows, outputs] */
  const void* w;  /* [outputs, inputs] */
  const void* z;  /* [rows, inputs] */
  void* dz;       /* [rows, inputs] */
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  int64_t dy_stride;
  int32_t dtype; /* of all tensors: f32 or bf16 */
} mimo_gelu_gemm_backward_args;
MIMO_API int32_t mimo_gelu_gemm_backward(mimo_stream* stream, const mimo_gelu_gemm_backward_args* args);
