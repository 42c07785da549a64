/* Masks of elastic models. */
#pragma once

#include "activation.h"

/* Factors of masks (docs/spec/elastic.md §9): factors[b][i] = values[b][sources[i]], 1 where the source is -1. */
typedef struct mimo_mask_factors_forward_args {
  const float* values;    /* [batch, value_count] */
  const int32_t* sources; /* [factor_count] below value_count */
  float* factors;         /* [batch, factor_count] */
  int64_t batch;
  int64_t value_count;
  int64_t factor_count;
} mimo_mask_factors_forward_args;
MIMO_API int32_t mimo_mask_factors_forward(mimo_stream* stream, const mimo_mask_factors_forward_args* args);

/* dvalues[b][v] += sum of dfactors[b][i] over the factors i of source v: members[starts[v]] to members[starts[v + 1] - 1]. */
typedef struct mimo_mask_factors_backward_args {
  const float* dfactors; /* [batch, factor_count] */
  const int32_t* members;
  const int32_t* starts; /* [value_count + 1] */
  float* dvalues;        /* [batch, value_count] */
  int64_t batch;
  int64_t value_count;
  int64_t factor_count;
} mimo_mask_factors_backward_args;
MIMO_API int32_t mimo_mask_factors_backward(mimo_stream* stream, const mimo_mask_factors_backward_args* args);

/* y[r][c] = addend[r][c] + scale factors[c] x[r][c] (docs/spec/elastic.md §9). */
typedef struct mimo_mask_columns_forward_args {
  const void* x;
  const void* addend;   /* [rows, width], or null = 0 */
  const float* factors; /* [width], or null = 1 */
  const float* scale;   /* [1], or null = 1 */
  void* y;
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t addend_stride;
  int64_t y_stride;
  int32_t dtype;
} mimo_mask_columns_forward_args;
MIMO_API int32_t mimo_mask_columns_forward(mimo_stream* stream, const mimo_mask_columns_forward_args* args);

/* dx[r][c] = scale factors[c] dy[r][c]. With S_c = sum over the rows of dy[r][c] x[r][c]: dfactors[c] += scale S_c, and
 * dscale[c] += factors[c] S_c, the part of column c in the gradient of the scale. */
typedef struct mimo_mask_columns_backward_args {
  const void* dy;
  const void* x; /* or null where neither sum is wanted */
  const float* factors; /* or null */
  const float* scale;   /* or null */
  void* dx;             /* or null */
  float* dfactors;      /* [width], or null */
  float* dscale;        /* [width], or null */
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride;
  int32_t accumulate; /* 1: dx is added to */
  int32_t x_dtype;
  int32_t gradient_dtype; /* of dy and dx */
} mimo_mask_columns_backward_args;
MIMO_API int32_t mimo_mask_columns_backward(mimo_stream* stream, const mimo_mask_columns_backward_args* args);

/* The norm of masked columns: y = scale h rsqrt(mean(h²) + epsilon) weight of groups of columns, h = factors x. With a
 * residual, h = factors (residual + x_scale x_factors x), the sum rounded to its type as mask_columns_forward has it. */
typedef struct mimo_masked_rms_norm_forward_args {
  const void* x;
  const void* residual;   /* stride = x_stride; or null */
  const float* x_factors; /* [width], or null = 1; without a residual it is null */
  const float* x_scale;   /* [1], or null = 1; without a residual it is null */
  const void* weight;     /* [width] */
  const float* factors;   /* [width], or null = 1 */
  const float* scale;     /* [1], or null = 1 */
  void* sum;              /* of x and the residual where there is one, else null; stride = width */
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
} mimo_masked_rms_norm_forward_args;
MIMO_API int32_t mimo_masked_rms_norm_forward(mimo_stream* stream, const mimo_masked_rms_norm_forward_args* args);

/* dx = dresidual + gradient of the norm at x; dx may be dresidual itself. */
typedef struct mimo_masked_rms_norm_backward_args {
  const void* dy;
  const void* x; /* the normalised input before its factors: the sum where there was a residual */
  const void* weight;
  const float* factors; /* or null */
  const float* scale;   /* or null */
  const float* rstd;
  const void* dresidual; /* [rows, width] added to dx, or null */
  void* dx;
  float* dweight;  /* [width], or null when the weight is frozen */
  float* dfactors; /* [width], or null */
  float* dscale;   /* [width]: every column's part of the gradient of the scale; or null */
  int64_t rows;
  int64_t width;
  int64_t group_size;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride; /* of dx and dresidual */
  int32_t dtype;
  int32_t weight_dtype;
} mimo_masked_rms_norm_backward_args;
MIMO_API int32_t mimo_masked_rms_norm_backward(mimo_stream* stream, const mimo_masked_rms_norm_backward_args* args);

/* y = probability of the row * activation(scale factors x), otherwise as activation_forward. */
typedef struct mimo_masked_activation_forward_args {
  const void* x;
  const float* factors;         /* [columns of x], or null = 1 */
  const float* scale;           /* [1], or null = 1 */
  const float* row_probability; /* [rows], or null = 1 */
  void* y;                      /* [rows, width] */
  const int32_t* row_count;     /* or null */
  int64_t rows;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t dtype;
} mimo_masked_activation_forward_args;
MIMO_API int32_t mimo_masked_activation_forward(mimo_stream* stream, const mimo_masked_activation_forward_args* args);

typedef struct mimo_masked_activation_backward_args {
  const void* dy;
  const void* x;
  const float* factors;         /* or null */
  const float* scale;           /* or null */
  const float* row_probability; /* or null */
  void* dx;
  float* drow_probability; /* [rows], written; or null */
  float* dfactors;         /* [columns of x], added to; or null */
  float* dscale;           /* [columns of x]: every column's part of the gradient of the scale; or null */
  const int32_t* row_count;
  int64_t rows;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t dtype;
} mimo_masked_activation_backward_args;
MIMO_API int32_t mimo_masked_activation_backward(mimo_stream* stream, const mimo_masked_activation_backward_args* args);

/* Masks the router logits of experts (docs/spec/elastic.md §10); m_e = factors[e], at most 1. sigmoid = 1: y is
 * the logit whose sigmoid is m_e sigma(logit); sigmoid = 0: y = m_e logit. An expert with m_e = 0 is blocked: y = -1e30. */
typedef struct mimo_mask_scores_forward_args {
  const float* logits;      /* [T, E] */
  const float* factors;     /* [E] */
  const float* expert_bias; /* [E], or null */
  float* y;                 /* [T, E] */
  float* masked_bias;       /* [E] m_e bias where sigmoid = 1, the bias where not; blocked_bias of blocked experts; or null */
  int64_t tokens;
  int64_t experts;
  float blocked_bias;
  int32_t sigmoid;
} mimo_mask_scores_forward_args;
MIMO_API int32_t mimo_mask_scores_forward(mimo_stream* stream, const mimo_mask_scores_forward_args* args);

/* Neither the bias nor a blocked expert has a gradient. */
typedef struct mimo_mask_scores_backward_args {
  const float* dy;     /* [T, E] */
  const float* logits; /* [T, E] */
  const float* factors;
  float* dlogits;  /* [T, E], or null */
  float* dfactors; /* [E], added to; or null */
  int64_t tokens;
  int64_t experts;
  int32_t sigmoid;
} mimo_mask_scores_backward_args;
MIMO_API int32_t mimo_mask_scores_backward(mimo_stream* stream, const mimo_mask_scores_backward_args* args);
