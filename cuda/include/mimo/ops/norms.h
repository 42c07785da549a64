/* RMSNorm and LayerNorm, each with an optional residual sum before it, and the norm of heads. */
#pragma once

#include "../stream.h"

/* h = x + residual, rounded to `dtype`;  y = h * rstd * (weight_offset + weight),  rstd = 1 / sqrt(mean(h²) + epsilon), the mean
 * over each run of `group_size` columns. The weight of a zero-centred norm has offset 1. */
typedef struct mimo_rms_norm_forward_args {
  const void* x;        /* [rows, width] */
  const void* residual; /* [rows, width], stride x_stride; or null: h = x */
  const void* weight;   /* [width] */
  void* sum;            /* h, [rows, width] contiguous, where there is a residual; else null */
  void* y;              /* [rows, width] */
  float* rstd;          /* [rows, width / group_size] */
  int64_t rows;
  int64_t width;
  int64_t group_size;
  int64_t x_stride;
  int64_t y_stride;
  float epsilon;
  float weight_offset;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_rms_norm_forward_args;
MIMO_API int32_t mimo_rms_norm_forward(mimo_stream* stream, const mimo_rms_norm_forward_args* args);

/* dx = dresidual + the gradient of the norm at h; dx may alias dresidual. */
typedef struct mimo_rms_norm_backward_args {
  const void* dy;        /* [rows, width] */
  const void* x;         /* h of _forward: x, or the sum where there was a residual */
  const void* weight;    /* [width] */
  const float* rstd;     /* of _forward */
  const void* dresidual; /* [rows, width], stride dx_stride, added to dx; or null */
  void* dx;              /* [rows, width] */
  float* dweight;        /* [width], added to; or null: the weight is frozen */
  int64_t rows;
  int64_t width;
  int64_t group_size;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride; /* of dx and dresidual */
  float weight_offset;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_rms_norm_backward_args;
MIMO_API int32_t mimo_rms_norm_backward(mimo_stream* stream, const mimo_rms_norm_backward_args* args);

/* h = x + residual, rounded to `dtype`;  y = (h - mean) * rstd * weight + bias,  rstd = 1 / sqrt(variance + epsilon), mean and
 * variance over a row's `width` columns, the variance divided by width. All tensors are contiguous. */
typedef struct mimo_layer_norm_forward_args {
  const void* x;        /* [rows, width] */
  const void* residual; /* [rows, width]; or null: h = x */
  const void* weight;   /* [width] */
  const void* bias;     /* [width] */
  void* sum;            /* h, [rows, width], where there is a residual; else null */
  void* y;              /* [rows, width] */
  float* mean;          /* [rows] */
  float* rstd;          /* [rows] */
  int64_t rows;
  int64_t width;
  float epsilon;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_layer_norm_forward_args;
MIMO_API int32_t mimo_layer_norm_forward(mimo_stream* stream, const mimo_layer_norm_forward_args* args);

/* dx = dresidual + the gradient of the norm at h; dx may alias dresidual. */
typedef struct mimo_layer_norm_backward_args {
  const void* dy;        /* [rows, width] */
  const void* x;         /* h of _forward: x, or the sum where there was a residual */
  const void* weight;    /* [width] */
  const float* mean;     /* of _forward */
  const float* rstd;     /* of _forward */
  const void* dresidual; /* [rows, width], added to dx; or null */
  void* dx;              /* [rows, width] */
  float* dweight;        /* [width], added to; or null */
  float* dbias;          /* [width], added to; or null */
  int64_t rows;
  int64_t width;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_layer_norm_backward_args;
MIMO_API int32_t mimo_layer_norm_backward(mimo_stream* stream, const mimo_layer_norm_backward_args* args);

/* RMSNorm of every query head and every key head of a fused projection: a row is a token's group, width / head_dim - 2 query
 * heads, a key head and a value head of head_dim columns each. The value head is copied. γ is weight_offset + weight. */
typedef struct mimo_head_norm_forward_args {
  const void* x;            /* [rows, width] contiguous */
  const void* query_weight; /* [head_dim] */
  const void* key_weight;   /* [head_dim] */
  void* y;                  /* [rows, width] contiguous */
  float* rstd;              /* [width / head_dim - 1, rows] */
  int64_t rows;
  int64_t width;
  int64_t head_dim;
  float epsilon;
  float weight_offset;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_head_norm_forward_args;
MIMO_API int32_t mimo_head_norm_forward(mimo_stream* stream, const mimo_head_norm_forward_args* args);

typedef struct mimo_head_norm_backward_args {
  const void* dy; /* [rows, width] contiguous */
  const void* x;  /* of _forward, as are the weights */
  const void* query_weight;
  const void* key_weight;
  const float* rstd;    /* of _forward */
  void* dx;             /* [rows, width] contiguous */
  float* dquery_weight; /* [head_dim], added to; or null */
  float* dkey_weight;   /* [head_dim], added to; or null */
  int64_t rows;
  int64_t width;
  int64_t head_dim;
  float weight_offset;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_head_norm_backward_args;
MIMO_API int32_t mimo_head_norm_backward(mimo_stream* stream, const mimo_head_norm_backward_args* args);
