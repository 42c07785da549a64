/*
 * Random numbers: Philox 4x32-10, key = seed. An element's value depends only on its index in the unsharded tensor, not on the
 * layout.
 */
#pragma once

#include "../stream.h"

enum mimo_distribution {
  MIMO_DISTRIBUTION_UNIFORM = 0, /* [a, b) */
  MIMO_DISTRIBUTION_NORMAL = 1   /* mean a, standard deviation b */
};

/* Fills y, a window of rows and columns of a tensor [.., full_width]. Element i of that tensor uses word i mod 4 of counter
 * i / 4, u = (word >> 8) 2^-24. Uniform: a + (b - a) u; a value that rounds to b becomes the largest number below b. Normal:
 * Box-Muller on the words (2p, 2p + 1): sqrt(-2 ln(1 - u_2p)) times cos(2π u_2p+1) for the even element and sin(2π u_2p+1) for
 * the odd one. */
typedef struct mimo_philox_fill_args {
  void* y; /* [rows, width] contiguous */
  int64_t rows;
  int64_t width;
  int64_t first_row;    /* of the block in the tensor */
  int64_t first_column; /* of the block in the tensor */
  int64_t full_width;
  int64_t seed;
  double a;
  double b;
  int32_t distribution; /* MIMO_DISTRIBUTION_* */
  int32_t dtype;
} mimo_philox_fill_args;
MIMO_API int32_t mimo_philox_fill(mimo_stream* stream, const mimo_philox_fill_args* args);

/* y = x * (u >= probability) / (1 - probability), u as in philox_fill for the element
 * (first_row + row) * full_width + first_column + column. The gradient is the same operation on dy. */
typedef struct mimo_dropout_args {
  const void* x; /* [rows, width] */
  void* y;       /* [rows, width] */
  int64_t rows;
  int64_t width;
  int64_t first_row;
  int64_t first_column;
  int64_t full_width;
  int64_t seed;
  float probability;
  int32_t dtype;
} mimo_dropout_args;
MIMO_API int32_t mimo_dropout(mimo_stream* stream, const mimo_dropout_args* args);
