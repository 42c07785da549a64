/* Copies, casts, sums, constants and scaling. */
#pragma once

#include "../stream.h"

/* y = alpha * x + beta * y, each with its own dtype and stride: copy, cast, scale or accumulate. An operand whose factor
 * is 0 is not read. */
typedef struct mimo_axpby_args {
  const void* x;            /* [rows, width] */
  void* y;                  /* [rows, width] */
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t y_stride;
  float alpha;
  float beta;
  int32_t x_dtype;
  int32_t y_dtype;
} mimo_axpby_args;
MIMO_API int32_t mimo_axpby(mimo_stream* stream, const mimo_axpby_args* args);

/* y = a + b, in fp32 and rounded once; y may be a or b. */
typedef struct mimo_add_args {
  const void* a;
  const void* b;
  void* y;
  int64_t elements;
  int32_t dtype;
} mimo_add_args;
MIMO_API int32_t mimo_add(mimo_stream* stream, const mimo_add_args* args);

/* Every element of y = value; y has any dtype. */
typedef struct mimo_fill_args {
  void* y;
  int64_t elements;
  double value;
  int32_t dtype;
} mimo_fill_args;
MIMO_API int32_t mimo_fill(mimo_stream* stream, const mimo_fill_args* args);

/* x *= factor[0], x in fp32. */
typedef struct mimo_scale_args {
  float* x;
  const float* factor;
  int64_t elements;
} mimo_scale_args;
MIMO_API int32_t mimo_scale(mimo_stream* stream, const mimo_scale_args* args);
