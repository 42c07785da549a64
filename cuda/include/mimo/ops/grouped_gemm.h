/* Grouped GEMM and biases for rows sorted by group (tokens by expert): group g has rows offsets[g] to offsets[g + 1] - 1. */
#pragma once

#include "e4m3.h"

/* c_r = a_r op(b_g) for the rows r of each group g. Groups may be empty. transpose_b = 1: b is [groups, n, k], op its
 * transpose (a forward product with weights [out, in]); 0: b is [groups, k, n] (the gradient of its input). Rows from
 * offsets[groups] on are neither read nor written.
 *
 * MIMO_MLP_RECIPE_E4M3_BLOCKWISE: a is quantised here as by e4m3_rows, b is of e4m3_matrices. On GPUs: sm_90, a and c in bf16 and
 * aligned to 16 bytes, n and k multiples of 16; else MIMO_ERROR_UNSUPPORTED. */
typedef struct mimo_grouped_gemm_args {
  const void* a;          /* [rows, k] */
  const void* b;          /* [groups, n, k] or [groups, k, n]; recipe e4m3: `values`, or `transposed` [groups, n, k] */
  const float* b_factors; /* recipe e4m3: `factors` of e4m3_matrices; else null */
  void* c;                /* [rows, n] */
  const int32_t* offsets; /* [groups + 1]; recipe e4m3: or null, one group of all rows */
  int64_t rows;           /* upper bound of offsets[groups] */
  int64_t groups;
  int64_t n;
  int64_t k;
  int32_t transpose_b;
  int32_t recipe;  /* MIMO_MLP_RECIPE_* */
  int32_t a_dtype; /* f32 or bf16, each of the three; recipe e4m3: b is u8 */
  int32_t b_dtype;
  int32_t c_dtype;
} mimo_grouped_gemm_args;
MIMO_API int32_t mimo_grouped_gemm(mimo_stream* stream, const mimo_grouped_gemm_args* args);

/* dw[g] = dy_gᵀ x_g, or dw[g] += dy_gᵀ x_g, over the rows of each group.
 *
 * MIMO_MLP_RECIPE_E4M3_BLOCKWISE: the rows of a group are split into blocks of 128, counted from its first row, and quantised
 * to e4m3: dy with a factor for each column of a block, x with a factor for 128 columns of it. Products over a block's rows are
 * summed in fp32, scaled by both factors and added to fp32 sums. An operand may already be in e4m3, as written by e4m3_rows; it
 * is then dequantised and quantised again in these blocks. On GPUs: sm_90, both operands in bf16 or e4m3, n and k multiples of
 * 16; else MIMO_ERROR_UNSUPPORTED. */
typedef struct mimo_grouped_gemm_weight_gradient_args {
  const void* dy;          /* [rows, n] */
  const float* dy_factors; /* factors of dy in e4m3 (dy_dtype u8); else null */
  const void* x;           /* [rows, k] */
  const float* x_factors;  /* as dy_factors, for x */
  float* dw;               /* [groups, n, k] */
  const int32_t* offsets;  /* [groups + 1] */
  int64_t rows;            /* upper bound of offsets[groups] */
  int64_t groups;
  int64_t n;
  int64_t k;
  int32_t accumulate; /* 1: added to dw, unchanged for an empty group; 0: dw is written, zero for an empty group */
  int32_t recipe;     /* MIMO_MLP_RECIPE_* */
  int32_t dy_dtype;   /* f32 or bf16; u8: e4m3 */
  int32_t x_dtype;    /* as dy_dtype */
} mimo_grouped_gemm_weight_gradient_args;
MIMO_API int32_t mimo_grouped_gemm_weight_gradient(mimo_stream* stream,
                                                   const mimo_grouped_gemm_weight_gradient_args* args);

/* y_r += factor_r * bias_g for the rows r of each group g, in fp32 and rounded once. */
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

/* dbias_g += Σ factor_r dy_r over the group's rows; dfactor_r = Σ dy_r bias_g over the columns. The order of the sums depends
 * on sizes and offsets alone. */
typedef struct mimo_grouped_bias_backward_args {
  const void* dy;         /* [rows, width] */
  const void* bias;       /* [groups, width]; or null where dfactor is */
  const float* factor;    /* [rows], or null = 1 */
  const int32_t* offsets; /* as in _forward */
  float* dbias;           /* [groups, width], added to; or null */
  float* dfactor;         /* [rows]; or null */
  int64_t rows;
  int64_t groups;
  int64_t width;
  int32_t accumulate_dfactor; /* 1: added to dfactor; 0: written */
  int32_t dtype;
} mimo_grouped_bias_backward_args;
MIMO_API int32_t mimo_grouped_bias_backward(mimo_stream* stream, const mimo_grouped_bias_backward_args* args);
