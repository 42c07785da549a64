/* Quantisation to e4m3 (fp8): operands of grouped GEMMs, of experts or of one projection (docs/spec/moe-performance.md §1.7). */
#pragma once

#include "../stream.h"

/* Floats that kernels may read past the end of row factors: allocations of such factors must be that much longer. */
#define MIMO_E4M3_SPARE_FACTORS 260

/* Arithmetic of grouped_mlp, grouped_gemm and grouped_gemm_weight_gradient. A layer in e4m3 may have plain weight gradients. */
enum mimo_mlp_recipe {
  MIMO_MLP_RECIPE_PLAIN = 0, /* operands as they are stored */
  /* Operands are quantised to e4m3, rows in runs of 128 columns and matrices in blocks of 128 x 128, each scaled by its own
   * power of two. Products over 128 columns are summed in fp32, scaled by both factors and added to fp32 sums. On GPUs: sm_90,
   * storage in bf16, hidden and width multiples of 16; else MIMO_ERROR_UNSUPPORTED. */
  MIMO_MLP_RECIPE_E4M3_BLOCKWISE = 1
};

/* Quantises matrices to e4m3 in blocks of 128 x 128 (smaller at the ends). A block is multiplied by the largest power of two
 * that keeps it within 448 and rounded; its factor is the inverse of that power. A block with an infinity becomes NaN, with
 * factor 1; NaN stays NaN. */
typedef struct mimo_e4m3_matrices_args {
  const void* matrices; /* [count, rows, width] */
  void* values;         /* [count, rows, width], one byte an element */
  void* transposed;     /* [count, width, rows], the same bytes; or null */
  float* factors;       /* [count, ceil(rows / 128), ceil(width / 128)] */
  int64_t count;
  int64_t rows;
  int64_t width;
  int32_t dtype; /* of matrices: f32 or bf16; GPUs: bf16, rows and width multiples of 16 */
} mimo_e4m3_matrices_args;
MIMO_API int32_t mimo_e4m3_matrices(mimo_stream* stream, const mimo_e4m3_matrices_args* args);

/* Quantises rows to e4m3 in runs of 128 columns (the last may be shorter), each like a block of e4m3_matrices. */
typedef struct mimo_e4m3_rows_args {
  const void* x;            /* [rows, width] */
  const int32_t* row_count; /* not null */
  void* values;             /* [rows, width], one byte an element */
  float* factors;           /* [ceil(width / 128), rows rounded up to a multiple of 4]: value = byte's number * factor */
  int64_t rows;
  int64_t width;
  int32_t dtype; /* of x: f32 or bf16; GPUs: bf16, width a multiple of 16 */
} mimo_e4m3_rows_args;
MIMO_API int32_t mimo_e4m3_rows(mimo_stream* stream, const mimo_e4m3_rows_args* args);
