/* Norms. */
#pragma once

#include "../stream.h"

/* h = x + residual, rounded to its type;  y = h * rsqrt(mean(h²) + epsilon) * weight, the mean over each run of
 * `group_size` columns. */
typedef struct mimo_rms_norm_forward_args {
  const void* x;
  const void* residual; /* stride = x_stride; or null: h = x */
  const void* weight;   /* [width] */
  void* sum;            /* h where there is a residual, else null; stride = width */
  void* y;
  float* rstd; /* [rows, width / group_size] */
  int64_t rows;
  int64_t width;
  int64_t group_size;
  int64_t x_stride;
  int64_t y_stride;
  float epsilon;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_rms_norm_forward_args;
MIMO_API int32_t mimo_rms_norm_forward(mimo_stream* stream, const mimo_rms_norm_forward_args* args);

/* dx = dresidual + gradient of the norm at x; dx may be dresidual itself. */
typedef struct mimo_rms_norm_backward_args {
  const void* dy;
  const void* x; /* the normalised input (h above) */
  const void* weight;
  const float* rstd;
  const void* dresidual; /* [rows, width] added to dx, or null */
  void* dx;
  float* dweight; /* [width], or null when the weight is frozen */
  int64_t rows;
  int64_t width;
  int64_t group_size;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride; /* of dx and dresidual */
  int32_t dtype;
  int32_t weight_dtype;
} mimo_rms_norm_backward_args;
MIMO_API int32_t mimo_rms_norm_backward(mimo_stream* stream, const mimo_rms_norm_backward_args* args);

/* h = x + residual, rounded to its type;  y = (h - mean) * rstd * weight + bias over rows of `width`, biased variance. */
typedef struct mimo_layer_norm_forward_args {
  const void* x;
  const void* residual; /* or null: h = x */
  const void* weight;
  const void* bias;
  void* sum; /* h where there is a residual, else null */
  void* y;
  float* mean; /* [rows] */
  float* rstd; /* [rows] */
  int64_t rows;
  int64_t width;
  float epsilon;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_layer_norm_forward_args;
MIMO_API int32_t mimo_layer_norm_forward(mimo_stream* stream, const mimo_layer_norm_forward_args* args);

typedef struct mimo_layer_norm_backward_args {
  const void* dy;
  const void* x; /* the normalised input (h above) */
  const void* weight;
  const float* mean;
  const float* rstd;
  const void* dresidual; /* or null */
  void* dx;
  float* dweight; /* or null */
  float* dbias;   /* or null */
  int64_t rows;
  int64_t width;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_layer_norm_backward_args;
MIMO_API int32_t mimo_layer_norm_backward(mimo_stream* stream, const mimo_layer_norm_backward_args* args);
