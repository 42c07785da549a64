/* Sums and counts; the order of a sum depends on sizes alone. */
#pragma once

#include "../stream.h"

/* dbias[c] += Σ dy[r][c] over the rows: the gradient of a bias. */
typedef struct mimo_column_sum_args {
  const void* dy;           /* [rows, width] */
  float* dbias;             /* [width] */
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t stride;
  int32_t dtype;
} mimo_column_sum_args;
MIMO_API int32_t mimo_column_sum(mimo_stream* stream, const mimo_column_sum_args* args);

/* sum[0] += Σ mask[i] x[i]; count[0] += Σ mask[i]; in fp64. */
typedef struct mimo_masked_sum_args {
  const float* x;
  const float* mask; /* or null = 1 */
  double* sum;
  double* count; /* or null */
  int64_t elements;
} mimo_masked_sum_args;
MIMO_API int32_t mimo_masked_sum(mimo_stream* stream, const mimo_masked_sum_args* args);

/* sum[0] += Σ x[i]², in fp64. */
typedef struct mimo_sum_of_squares_args {
  const void* x;
  double* sum;
  int64_t elements;
  int32_t dtype;
} mimo_sum_of_squares_args;
MIMO_API int32_t mimo_sum_of_squares(mimo_stream* stream, const mimo_sum_of_squares_args* args);

/* count[0] += the number of elements of x that are 0. */
typedef struct mimo_count_zeros_args {
  const float* x;
  double* count;
  int64_t elements;
} mimo_count_zeros_args;
MIMO_API int32_t mimo_count_zeros(mimo_stream* stream, const mimo_count_zeros_args* args);

/*
 * sum[0] += Σ h(i, x[i]) modulo 2^64. h is SplitMix64's mixing of i * 0x9E3779B97F4A7C15 + x[i], one to one in x[i], so another word
 * somewhere makes another sum.
 */
typedef struct mimo_checksum_args {
  const uint32_t* x;
  uint64_t* sum;
  int64_t elements;
} mimo_checksum_args;
MIMO_API int32_t mimo_checksum(mimo_stream* stream, const mimo_checksum_args* args);

/* flag[0] = 1 if an element of x is NaN or infinite; else flag is unchanged. */
typedef struct mimo_find_nonfinite_args {
  const void* x;
  int32_t* flag;
  int64_t elements;
  int32_t dtype;
} mimo_find_nonfinite_args;
MIMO_API int32_t mimo_find_nonfinite(mimo_stream* stream, const mimo_find_nonfinite_args* args);
