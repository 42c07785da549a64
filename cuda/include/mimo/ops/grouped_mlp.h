/* The MLP of a layer's experts as one operation: both projections and the activation. */
#pragma once

#include "activation.h"
#include "e4m3.h"

/* For rows that are sorted by expert (group), offsets as in grouped_gemm:
 *
 *     z_r  = x_r w1_gᵀ + b1_g                    [z_width]; stored, and read by the activation as stored
 *     hs_r = p_r * activation(z_r)               [width]; fp32, rounded once
 *     y_r  = hs_r w2_gᵀ + p_r * b2_g             [hidden]; fp32, rounded once
 *
 * z_width is width, or 2 width for the gated kinds, whose columns of z (rows of w1 and b1) are the gate half and the linear
 * half or, with `interleave` = s, alternating blocks of s gate and s linear columns. p stays in fp32. It weights b2 because
 * moe_unpermute sums rows without weights; it does not weight b1.
 *
 * Groups may be empty, even all of them. Rows from offsets[groups] on are neither read nor written, in any operand.
 *
 * A training step runs _forward with z and keeps x, z and row_probability; runs _backward, which gives the gradients of the
 * rows, of row_probability and of the biases, and also dz and hs, which the gradients of the weights need; and then, at once or
 * later, runs grouped_gemm_weight_gradient twice: dw2 of (dy, hs), dw1 of (dz, x). The order of the sums in dp, db1 and db2
 * depends on sizes and offsets alone.
 *
 * With the plain recipe every shape works; the fast kernels of GPUs take bf16 with hidden and width multiples of 64. */
typedef struct mimo_grouped_mlp_forward_args {
  const void* x;                /* [rows, hidden]; or null where x_e4m3 is given */
  const void* x_e4m3;           /* recipe e4m3: x quantised by e4m3_rows or moe_permute; or null: x is quantised here */
  const float* x_factors;       /* factors of x_e4m3, with MIMO_E4M3_SPARE_FACTORS floats behind them; null where x_e4m3 is */
  const void* w1;               /* [groups, z_width, hidden]; recipe e4m3: `values` of e4m3_matrices */
  const float* w1_factors;      /* recipe e4m3: `factors` of e4m3_matrices; else null */
  const void* b1;               /* [groups, z_width], or null */
  const void* w2;               /* [groups, hidden, width]; recipe e4m3: `values` of e4m3_matrices */
  const float* w2_factors;      /* as w1_factors */
  const void* b2;               /* [groups, hidden], or null */
  const float* row_probability; /* p, [rows]; or null = 1 */
  const int32_t* offsets;       /* [groups + 1] */
  void* z;                      /* [rows, z_width]; or null if no _backward follows */
  void* y;                      /* [rows, hidden] */
  int64_t rows;                 /* upper bound of offsets[groups] */
  int64_t groups;
  int64_t hidden;
  int64_t width;
  int64_t interleave;  /* gated kinds: rows of a block, which divide width; 0: halves */
  float clamp;         /* gated kinds: limits the gate from above and the linear half on both sides; infinity = no limit */
  float linear_offset; /* of MIMO_ACTIVATION_QUICK_GEGLU */
  int32_t kind;        /* MIMO_ACTIVATION_* */
  int32_t recipe;      /* MIMO_MLP_RECIPE_* */
  int32_t dtype;       /* f32 or bf16, of x, b1, b2, z and y, and of w1 and w2 with the plain recipe */
} mimo_grouped_mlp_forward_args;
MIMO_API int32_t mimo_grouped_mlp_forward(mimo_stream* stream, const mimo_grouped_mlp_forward_args* args);

/* With a_r = activation(z_r), recomputed because p may be 0, and dhs_r = dy_r w2_g, which kernels may round to `dtype`:
 *
 *     dp_r  = dhs_r · a_r + dy_r · b2_g          fp32
 *     dz_r  = p_r * dhs_r * activation'(z_r)     rounded once; at a clamp's limit the gradient passes
 *     hs_r  = p_r * a_r                          as in _forward
 *     dx_r  = dz_r w1_g
 *     db1_g += Σ dz_r (as stored),  db2_g += Σ p_r dy_r      over the group's rows */
typedef struct mimo_grouped_mlp_backward_args {
  const void* dy;               /* [rows, hidden]; or null if dy_e4m3 is given and neither db2 nor drow_probability with b2 */
  const void* dy_e4m3;          /* as x_e4m3 */
  const float* dy_factors;      /* as x_factors */
  const void* z;                /* of _forward */
  const void* w1;               /* as in _forward; recipe e4m3: `transposed` of e4m3_matrices */
  const float* w1_factors;      /* as in _forward */
  const void* w2;               /* as w1 */
  const float* w2_factors;      /* as in _forward */
  const void* b2;               /* [groups, hidden], or null; only used for drow_probability */
  const float* row_probability; /* of _forward, or null = 1 */
  const int32_t* offsets;       /* [groups + 1] */
  void* dx;                     /* [rows, hidden], or null */
  void* dz;                     /* [rows, z_width]; or null where dz_e4m3 is given and db1 is null */
  void* dz_e4m3;                /* recipe e4m3: receives dz quantised as by e4m3_rows; or null */
  float* dz_factors;            /* factors of dz_e4m3, with MIMO_E4M3_SPARE_FACTORS floats behind them; or null */
  void* hs;                     /* [rows, width]; or null if not wanted, or wanted in e4m3 only */
  void* hs_e4m3;                /* recipe e4m3: receives hs quantised as by e4m3_rows; or null */
  float* hs_factors;            /* factors of hs_e4m3; or null */
  float* drow_probability;      /* dp, [rows], written; or null */
  float* db1;                   /* [groups, z_width], added to; or null */
  float* db2;                   /* [groups, hidden], added to; or null */
  int64_t rows;
  int64_t groups;
  int64_t hidden;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t recipe;
  int32_t dtype;
} mimo_grouped_mlp_backward_args;
MIMO_API int32_t mimo_grouped_mlp_backward(mimo_stream* stream, const mimo_grouped_mlp_backward_args* args);
