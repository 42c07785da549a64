/*
 * Masks of elastic models (docs/spec/elastic.md §9, §10): columns of activations are multiplied by factors and by a scale in
 * device memory. dscale [columns] receives each column's contribution to the gradient of the scale; their sum is the gradient.
 */
#pragma once

#include "activation.h"

/* factors[b][i] = values[b][sources[i]], 1 where the source is -1. */
typedef struct mimo_mask_factors_forward_args {
  const float* values;    /* [batch, value_count] */
  const int32_t* sources; /* [factor_count], -1 to value_count - 1 */
  float* factors;         /* [batch, factor_count] */
  int64_t batch;
  int64_t value_count;
  int64_t factor_count;
} mimo_mask_factors_forward_args;
MIMO_API int32_t mimo_mask_factors_forward(mimo_stream* stream, const mimo_mask_factors_forward_args* args);

/* dvalues[b][v] += Σ dfactors[b][i] over the factors i whose source is v: members[starts[v]] to members[starts[v + 1] - 1]. */
typedef struct mimo_mask_factors_backward_args {
  const float* dfactors;  /* [batch, factor_count] */
  const int32_t* members; /* [starts[value_count]]: factors by their source */
  const int32_t* starts;  /* [value_count + 1] */
  float* dvalues;         /* [batch, value_count], added to */
  int64_t batch;
  int64_t value_count;
  int64_t factor_count;
} mimo_mask_factors_backward_args;
MIMO_API int32_t mimo_mask_factors_backward(mimo_stream* stream, const mimo_mask_factors_backward_args* args);

/* y[r][c] = addend[r][c] + scale factors[c] x[r][c]. */
typedef struct mimo_mask_columns_forward_args {
  const void* x;            /* [rows, width] */
  const void* addend;       /* [rows, width], or null = 0 */
  const float* factors;     /* [width], or null = 1 */
  const float* scale;       /* [1], or null = 1 */
  void* y;                  /* [rows, width] */
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t addend_stride;
  int64_t y_stride;
  int32_t dtype;
} mimo_mask_columns_forward_args;
MIMO_API int32_t mimo_mask_columns_forward(mimo_stream* stream, const mimo_mask_columns_forward_args* args);

/* dx[r][c] = scale factors[c] dy[r][c]; dx may alias dy. With S_c = Σ dy[r][c] x[r][c] over the rows: dfactors[c] += scale
 * S_c, dscale[c] += factors[c] S_c. */
typedef struct mimo_mask_columns_backward_args {
  const void* dy;           /* [rows, width] */
  const void* x;            /* of _forward; or null where dfactors and dscale are */
  const float* factors;     /* of _forward, or null = 1 */
  const float* scale;       /* of _forward, or null = 1 */
  void* dx;                 /* [rows, width], or null */
  float* dfactors;          /* [width], added to; or null */
  float* dscale;            /* [width], added to; or null */
  const int32_t* row_count; /* or null */
  int64_t rows;
  int64_t width;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride;
  int32_t accumulate; /* 1: added to dx; 0: dx is written */
  int32_t x_dtype;
  int32_t gradient_dtype; /* of dy and dx */
} mimo_mask_columns_backward_args;
MIMO_API int32_t mimo_mask_columns_backward(mimo_stream* stream, const mimo_mask_columns_backward_args* args);

/* rms_norm_forward of masked columns: y = scale h rstd weight, h = factors x. With a residual, sum = residual + x_scale
 * x_factors x, rounded to `dtype` as mask_columns_forward rounds it, and h = factors sum. */
typedef struct mimo_masked_rms_norm_forward_args {
  const void* x;          /* [rows, width] */
  const void* residual;   /* [rows, width], stride x_stride; or null */
  const float* x_factors; /* [width], or null = 1; null without a residual */
  const float* x_scale;   /* [1], or null = 1; null without a residual */
  const void* weight;     /* [width] */
  const float* factors;   /* [width], or null = 1 */
  const float* scale;     /* [1], or null = 1 */
  void* sum;              /* [rows, width] contiguous, where there is a residual; else null */
  void* y;                /* [rows, width] */
  float* rstd;            /* [rows, width / group_size] */
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

/* dx = dresidual + the gradient at the norm's input; dx may alias dresidual. */
typedef struct mimo_masked_rms_norm_backward_args {
  const void* dy;        /* [rows, width] */
  const void* x;         /* x of _forward, or the sum where there was a residual */
  const void* weight;    /* [width] */
  const float* factors;  /* of _forward, or null = 1 */
  const float* scale;    /* of _forward, or null = 1 */
  const float* rstd;     /* of _forward */
  const void* dresidual; /* [rows, width], stride dx_stride, added to dx; or null */
  void* dx;              /* [rows, width] */
  float* dweight;        /* [width], added to; or null: the weight is frozen */
  float* dfactors;       /* [width], added to; or null */
  float* dscale;         /* [width], added to; or null */
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

/* y = row_probability * activation(scale factors x); shapes and the other fields as in activation_forward. */
typedef struct mimo_masked_activation_forward_args {
  const void* x;                /* [rows, width] or [rows, 2 width] */
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
  const void* dy;               /* [rows, width] */
  const void* x;                /* of _forward */
  const float* factors;         /* of _forward, or null = 1 */
  const float* scale;           /* of _forward, or null = 1 */
  const float* row_probability; /* of _forward, or null = 1 */
  void* dx;                     /* shaped like x */
  float* drow_probability;      /* [rows], written; or null */
  float* dfactors;              /* [columns of x], added to; or null */
  float* dscale;                /* [columns of x], added to; or null */
  const int32_t* row_count;     /* or null */
  int64_t rows;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t dtype;
} mimo_masked_activation_backward_args;
MIMO_API int32_t mimo_masked_activation_backward(mimo_stream* stream, const mimo_masked_activation_backward_args* args);

/* Masks a router's logits, m_e = factors[e] <= 1. sigmoid = 1: y is the logit whose sigmoid is m_e σ(logit); sigmoid = 0:
 * y = m_e logit. An expert with m_e <= 0 is blocked: y = -1e30. */
typedef struct mimo_mask_scores_forward_args {
  const float* logits;      /* [T, E] */
  const float* factors;     /* [E] */
  const float* expert_bias; /* [E], or null */
  float* y;                 /* [T, E] */
  float* masked_bias;       /* [E]: m_e bias with sigmoid = 1, else the bias; blocked_bias for a blocked expert; or null */
  int64_t tokens;
  int64_t experts;
  float blocked_bias;
  int32_t sigmoid;
} mimo_mask_scores_forward_args;
MIMO_API int32_t mimo_mask_scores_forward(mimo_stream* stream, const mimo_mask_scores_forward_args* args);

/* dlogits = dy ∂y/∂logit, dfactors += Σ dy ∂y/∂m_e over the tokens; both are 0 for a blocked expert. The bias gets no
 * gradient. */
typedef struct mimo_mask_scores_backward_args {
  const float* dy;      /* [T, E] */
  const float* logits;  /* [T, E] */
  const float* factors; /* [E] */
  float* dlogits;       /* [T, E], or null */
  float* dfactors;      /* [E], added to; or null */
  int64_t tokens;
  int64_t experts;
  int32_t sigmoid;
} mimo_mask_scores_backward_args;
MIMO_API int32_t mimo_mask_scores_backward(mimo_stream* stream, const mimo_mask_scores_backward_args* args);
