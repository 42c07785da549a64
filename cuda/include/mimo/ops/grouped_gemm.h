/* Products and biases of rows that are sorted by group. */
#pragma once

#include "e4m3.h"

/* Rows of group g, offsets[g] <= row < offsets[g+1], times that group's matrix. Groups may be empty.
 * transpose_b = 1: b is [groups, n, k] (a forward product with weights [out, in]); 0: [groups, k, n] (its input
 * gradient). Rows past offsets[groups] are left alone. */
typedef struct mimo_grouped_gemm_args {
  const void* a; /* [rows, k] */
  const void* b;
  void* c;                /* [rows, n] */
  const int32_t* offsets; /* [groups + 1] */
  int64_t rows;           /* upper bound of offsets[groups] */
  int64_t groups;
  int64_t n;
  int64_t k;
  int32_t transpose_b;
  int32_t a_dtype;
  int32_t b_dtype;
  int32_t c_dtype;
} mimo_grouped_gemm_args;
MIMO_API int32_t mimo_grouped_gemm(mimo_stream* stream, const mimo_grouped_gemm_args* args);

/* dw[g] = dy_gᵀ x_g, or dw[g] += dy_gᵀ x_g, for every group. A dw that is written is not read.
 *
 * MIMO_MLP_RECIPE_E4M3_BLOCKWISE: rows of a group are cut into blocks of 128 at their distance from its first row. A block of dy has
 * a factor for every column, a block of x for 128 columns. Products of a block's rows are summed in fp32, divided by both factors and
 * added to fp32 sums. Operands may be rows in e4m3, a byte an element, as e4m3_rows writes them: then blocks are rounded from
 * the numbers that are left. On GPUs: sm_90, both in bf16 or e4m3, n and k multiples of 16. */
typedef struct mimo_grouped_gemm_weight_gradient_args {
  const void* dy;          /* [rows, n] */
  const float* dy_factors; /* of a dy in e4m3, whose dy_dtype is u8; else null */
  const void* x;           /* [rows, k] */
  const float* x_factors;  /* as dy_factors */
  float* dw;               /* [groups, n, k] */
  const int32_t* offsets;
  int64_t rows;
  int64_t groups;
  int64_t n;
  int64_t k;
  int32_t accumulate; /* 1: added to dw, groups without rows are left alone; 0: theirs is zero */
  int32_t recipe;     /* MIMO_MLP_RECIPE_* */
  int32_t dy_dtype;
  int32_t x_dtype;
} mimo_grouped_gemm_weight_gradient_args;
MIMO_API int32_t mimo_grouped_gemm_weight_gradient(mimo_stream* stream,
                                                   const mimo_grouped_gemm_weight_gradient_args* args);

/* y_r += factor_r * bias_g for the rows r of every group g; the sum is fp32, one rounding. */
typedef struct mimo_grouped_bias_forward_args {
  const void* bias;       /* [groups, width] */
  const float* factor;    /* [rows], or null = 1 */
  const int32_t* offsets; /* [groups + 1], or null: one group of all rows */
  void* y;                /* [rows, width] */
  int64_t rows;           /* upper bound of offsets[groups] */
  int64_t groups;
  int64_t width;
  int32_t dtype; /* of bias and y */
} mimo_grouped_bias_forward_args;
MIMO_API int32_t mimo_grouped_bias_forward(mimo_stream* stream, const mimo_grouped_bias_forward_args* args);

/* dbias_g += sum over the group's rows of factor_r dy_r; dfactor_r = sum over columns of dy_r bias_g. The rows of a group
 * are summed in runs cut at their distance from its first row, and the runs in order. */
typedef struct mimo_grouped_bias_backward_args {
  const void* dy;      /* [rows, width] */
  const void* bias;    /* [groups, width]; read for dfactor alone, else it may be null */
  const float* factor; /* or null = 1 */
  const int32_t* offsets;
  float* dbias;   /* [groups, width], added to; or null */
  float* dfactor; /* [rows]; or null */
  int64_t rows;
  int64_t groups;
  int64_t width;
  int32_t accumulate_dfactor; /* 1: added to dfactor; 0: written */
  int32_t dtype;
} mimo_grouped_bias_backward_args;
MIMO_API int32_t mimo_grouped_bias_backward(mimo_stream* stream, const mimo_grouped_bias_backward_args* args);
