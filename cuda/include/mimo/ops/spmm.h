/* Products with a sparse matrix. */
#pragma once

#include "../stream.h"

/* y = A x, or y += A x, A sparse in CSR format: row r of A x is the sum of values[i] * x[columns[i]] over
 * offsets[r] <= i < offsets[r + 1], in that order, in fp32, rounded once. Used to interpolate tables and to insert, drop and
 * regroup rows; the gradients are products with the transposed matrix. */
typedef struct mimo_spmm_args {
  const void* x;          /* [.., width] */
  const int32_t* offsets; /* [rows + 1] */
  const int32_t* columns; /* [offsets[rows]]: rows of x */
  const float* values;    /* [offsets[rows]], or null = 1 */
  void* y;                /* [rows, width] */
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t y_stride;
  int32_t accumulate; /* 1: added to y, rows without entries are unchanged; 0: y is written */
  int32_t x_dtype;
  int32_t y_dtype;
} mimo_spmm_args;
MIMO_API int32_t mimo_spmm(mimo_stream* stream, const mimo_spmm_args* args);
