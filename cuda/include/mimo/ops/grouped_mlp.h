/* The feed-forward layers of experts. */
#pragma once

#include "activation.h"
#include "e4m3.h"

/* Both projections of the experts of a layer and the activation between them, for rows sorted by expert (group):
 *
 *     z_r  = x_r w1_gᵀ + b1_g                    [z_width]; stored, and read by the activation as stored
 *     hs_r = p_r * activation(z_r)               [width]; fp32, rounded once
 *     y_r  = hs_r w2_gᵀ + p_r * b2_g             [hidden]; fp32, rounded once
 *
 * z_width is width, or 2 width for the gated kinds, whose columns of z (rows of w1 and b1) are the gate half and the linear
 * half or, with `interleave` = s, blocks of s gate columns and s linear columns in turn. p is fp32 from end to end. The
 * bias b1 is not weighted by p; the rows that leave are added up without weights, so p weighs b2.
 *
 * Groups may be empty, all of them too. Rows from offsets[groups] on are neither read nor written, in any operand.
 *
 * A training step runs _forward with z and keeps x, z and row_probability; runs _backward, which gives the gradients of the
 * rows, of row_probability and of the biases, and dz and hs, which the gradients of the weights read; and then, at once or
 * later, grouped_gemm_weight_gradient twice: dw2 of (dy, hs), dw1 of (dz, x). The sums behind dp, db1 and db2 have an order
 * that the sizes and offsets alone decide.
 *
 * Kernels may keep dhs (of _backward) in fp32 or round it once to `dtype`. Every shape works; fast kernels take bf16 with hidden
 * and width multiples of 64. */
typedef struct mimo_grouped_mlp_forward_args {
  const void* x;                /* [rows, hidden]; or null, where x_e4m3 is given */
  const void* x_e4m3;           /* e4m3: x as e4m3_rows and moe_permute round it, or null: it is rounded here */
  const float* x_factors;       /* of x_e4m3, MIMO_E4M3_SPARE_FACTORS behind them; or null */
  const void* w1;               /* [groups, z_width, hidden]; e4m3: its values */
  const float* w1_factors;      /* e4m3: of e4m3_matrices; else null */
  const void* b1;               /* [groups, z_width], or null */
  const void* w2;               /* [groups, hidden, width]; e4m3: its values */
  const float* w2_factors;
  const void* b2;               /* [groups, hidden], or null */
  const float* row_probability; /* p, [rows]; or null = 1 */
  const int32_t* offsets;       /* [groups + 1], on the device */
  void* z;                      /* [rows, z_width]; or null: no backward will come */
  void* y;                      /* [rows, hidden] */
  int64_t rows;                 /* upper bound of offsets[groups] */
  int64_t groups;
  int64_t hidden;
  int64_t width;
  int64_t interleave;  /* gated kinds: rows of a block, which divide width; 0: halves */
  float clamp;         /* gated kinds: gate above, linear half both sides; infinity = none */
  float linear_offset; /* quick GeGLU */
  int32_t kind;        /* MIMO_ACTIVATION_* */
  int32_t recipe;      /* MIMO_MLP_RECIPE_* */
  int32_t dtype;       /* of all but row_probability, offsets and e4m3's matrices: f32 or bf16 */
} mimo_grouped_mlp_forward_args;
MIMO_API int32_t mimo_grouped_mlp_forward(mimo_stream* stream, const mimo_grouped_mlp_forward_args* args);

/* With a_r = activation(z_r), made anew (p may be 0), and dhs_r = dy_r w2_g:
 *
 *     dp_r  = dhs_r · a_r + dy_r · b2_g          fp32
 *     dz_r  = p_r * dhs_r * activation'(z_r)     rounded once; a value on the limit of a clamped half lets its gradient through
 *     hs_r  = p_r * a_r                          as in _forward
 *     dx_r  = dz_r w1_g
 *     db1_g += Σ dz_r (as stored),  db2_g += Σ p_r dy_r      over the group's rows */
typedef struct mimo_grouped_mlp_backward_args {
  const void* dy;          /* [rows, hidden]; or null, where dy_e4m3 is given and neither db2 nor drow_probability with a b2 asks */
  const void* dy_e4m3;     /* as x_e4m3 */
  const float* dy_factors; /* as x_factors */
  const void* z;           /* of _forward */
  const void* w1;          /* e4m3: its transposed values */
  const float* w1_factors;
  const void* w2; /* e4m3: its transposed values */
  const float* w2_factors;
  const void* b2;               /* or null; read for drow_probability alone */
  const float* row_probability; /* or null = 1 */
  const int32_t* offsets;
  void* dx;                /* [rows, hidden], or null */
  void* dz;                /* [rows, z_width]; or null, where dz_e4m3 is given and no db1 */
  void* dz_e4m3;           /* e4m3: dz as e4m3_rows rounds it; or null */
  float* dz_factors;       /* of dz_e4m3, MIMO_E4M3_SPARE_FACTORS behind them; or null */
  void* hs;                /* [rows, width]; or null: w2 gets no gradient, or hs_e4m3 is given */
  void* hs_e4m3;           /* e4m3: hs as e4m3_rows rounds it; or null */
  float* hs_factors;       /* of hs_e4m3; or null */
  float* drow_probability; /* dp, [rows], written; or null */
  float* db1;              /* [groups, z_width], added to; or null */
  float* db2;              /* [groups, hidden], added to; or null */
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
