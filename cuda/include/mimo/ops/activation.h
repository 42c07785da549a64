/* Activations of feed-forward layers. */
#pragma once

#include "../stream.h"

enum mimo_activation {
  MIMO_ACTIVATION_SQUARED_RELU = 0, /* max(x, 0)² */
  MIMO_ACTIVATION_SWIGLU = 1,       /* x₁ σ(x₁) x₂, gate half first */
  MIMO_ACTIVATION_QUICK_GEGLU = 2,  /* x₁ σ(1.702 x₁) (x₂ + linear_offset), gate half first */
  MIMO_ACTIVATION_GELU_TANH = 3,    /* 0.5 x (1 + tanh(0.7978845608 x (1 + 0.044715 x²))) */
  MIMO_ACTIVATION_GELU_ERF = 4      /* 0.5 x (1 + erf(x / sqrt 2)) */
};

/* y = probability of the row * activation(x). x is [rows, width], or [rows, 2 width] for the gated kinds: the gate half and
 * the linear half, or with `interleave` = s blocks of s gate columns and s linear columns in turn (s divides width). */
typedef struct mimo_activation_forward_args {
  const void* x;
  const float* row_probability; /* [rows], or null = 1 */
  void* y;                      /* [rows, width] */
  const int32_t* row_count;     /* or null */
  int64_t rows;
  int64_t width;
  int64_t interleave;  /* 0: halves */
  float clamp;         /* gate above, linear half both sides; infinity = none */
  float linear_offset; /* quick GeGLU */
  int32_t kind;
  int32_t dtype;
} mimo_activation_forward_args;
MIMO_API int32_t mimo_activation_forward(mimo_stream* stream, const mimo_activation_forward_args* args);

typedef struct mimo_activation_backward_args {
  const void* dy;
  const void* x;
  const float* row_probability; /* or null */
  void* dx;
  float* drow_probability; /* [rows], written; or null */
  const int32_t* row_count;
  int64_t rows;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t dtype;
} mimo_activation_backward_args;
MIMO_API int32_t mimo_activation_backward(mimo_stream* stream, const mimo_activation_backward_args* args);
