/* Random numbers. */
#pragma once

#include "../stream.h"

enum mimo_distribution {
  MIMO_DISTRIBUTION_UNIFORM = 0, /* [a, b) */
  MIMO_DISTRIBUTION_NORMAL = 1   /* mean a, standard deviation b */
};

/* Philox 4x32-10, key = seed, counter = element index in the unsharded tensor: a block of rows and columns of a
 * [.., full_width] tensor. Uniform: u = (word >> 8) 2^-24; element i takes word i mod 4 of counter i / 4; a value that
 * rounds to b becomes the float before it. Normal: Box-Muller on the pair of words (2p, 2p+1),
 * sqrt(-2 ln(1 - u_2p)) times cos(2π u_2p+1) for the even element, sin(2π u_2p+1) for the odd one. */
typedef struct mimo_philox_fill_args {
  void* y; /* [rows, width] contiguous */
  int64_t rows;
  int64_t width;
  int64_t first_row;
  int64_t first_column;
  int64_t full_width;
  int64_t seed;
  double a;
  double b;
  int32_t distribution;
  int32_t dtype;
} mimo_philox_fill_args;
MIMO_API int32_t mimo_philox_fill(mimo_stream* stream, const mimo_philox_fill_args* args);

/* y = x * (u >= probability) / (1 - probability); u is word 0..3 of philox(seed, index / 4) with
 * index = (first_row + row) * full_width + first_column + column: the mask is the same under every layout. Backward: the same
 * operation on dy. */
typedef struct mimo_dropout_args {
  const void* x;
  void* y;
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
