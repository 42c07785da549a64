/* Operands of the products of experts in e4m3. */
#pragma once

#include "../stream.h"

/* Numbers behind the factors of rows in e4m3 that kernels may read. */
#define MIMO_E4M3_SPARE_FACTORS 260

/* How grouped_mlp multiplies, and how grouped_gemm_weight_gradient does: the gradient of a layer in e4m3 may be plain. */
enum mimo_mlp_recipe {
  MIMO_MLP_RECIPE_PLAIN = 0, /* operands as they are stored */
  /* Operands are rounded to e4m3 (docs/spec/moe-performance.md §1.7): rows in runs of 128 columns, matrices in blocks of 128 x
   * 128 by e4m3_matrices, each times its own power of two. Products of 128 columns are summed in fp32, divided by both
   * factors and added to fp32 sums. On GPUs: sm_90, storage in bf16, hidden and width multiples of 16. */
  MIMO_MLP_RECIPE_E4M3_BLOCKWISE = 1
};

/* Matrices rounded to e4m3 in blocks of 128 x 128, cut short at the ends (docs/spec/moe-performance.md §1.7). A block is
 * multiplied by the largest power of two that keeps it within 448; its factor is that power's inverse. Not finite: NaN. */
typedef struct mimo_e4m3_matrices_args {
  const void* matrices; /* [count, rows, width] */
  void* values;         /* [count, rows, width], a byte an element */
  void* transposed;     /* [count, width, rows]: the same values; or null */
  float* factors;       /* [count, ceil(rows / 128), ceil(width / 128)] */
  int64_t count;
  int64_t rows;
  int64_t width;
  int32_t dtype; /* of matrices: f32 or bf16; GPUs: bf16, rows and width multiples of 16 */
} mimo_e4m3_matrices_args;
MIMO_API int32_t mimo_e4m3_matrices(mimo_stream* stream, const mimo_e4m3_matrices_args* args);

/* Rows rounded to e4m3 in runs of 128 columns, the last one cut short, by the rule of e4m3_matrices. */
typedef struct mimo_e4m3_rows_args {
  const void* x;            /* [rows, width] */
  const int32_t* row_count; /* on the device: later rows are left alone */
  void* values;             /* [rows, width], a byte an element */
  float* factors;           /* [ceil(width / 128), rows rounded up to 4] what a run's bytes are multiplied by */
  int64_t rows;
  int64_t width;
  int32_t dtype; /* of x: f32 or bf16; GPUs: bf16, width a multiple of 16 */
} mimo_e4m3_rows_args;
MIMO_API int32_t mimo_e4m3_rows(mimo_stream* stream, const mimo_e4m3_rows_args* args);
