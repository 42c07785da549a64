/* Activations of feed-forward layers, ungated and gated. */
#pragma once

#include "../stream.h"

enum mimo_activation {
  MIMO_ACTIVATION_SQUARED_RELU = 0, /* max(x, 0)² */
  MIMO_ACTIVATION_SWIGLU = 1,       /* gated: x₁ σ(x₁) x₂, x₁ of the gate half, x₂ of the linear half */
  MIMO_ACTIVATION_QUICK_GEGLU = 2,  /* gated: x₁ σ(1.702 x₁) (x₂ + linear_offset) */
  MIMO_ACTIVATION_GELU_TANH = 3,    /* 0.5 x (1 + tanh(0.7978845608 x (1 + 0.044715 x²))) */
  MIMO_ACTIVATION_GELU_ERF = 4,     /* 0.5 x (1 + erf(x / sqrt 2)) */
  MIMO_ACTIVATION_GEGLU = 5         /* gated: GELU_TANH of x₁, times x₂ */
};

/* y = row_probability * activation(x). x is [rows, width], or [rows, 2 width] for the gated kinds: the gate half, then the
 * linear half; or, with `interleave` = s, which divides width, alternating blocks of s gate and s linear columns. */
typedef struct mimo_activation_forward_args {
  const void* x;
  const float* row_probability; /* [rows], or null = 1 */
  void* y;                      /* [rows, width] */
  const int32_t* row_count;     /* or null */
  int64_t rows;
  int64_t width;
  int64_t interleave;  /* 0: halves */
  float clamp;         /* gated kinds: limits the gate from above and the linear half on both sides; infinity = no limit */
  float linear_offset; /* of MIMO_ACTIVATION_QUICK_GEGLU */
  int32_t kind;        /* MIMO_ACTIVATION_* */
  int32_t dtype;       /* of x and y */
} mimo_activation_forward_args;
MIMO_API int32_t mimo_activation_forward(mimo_stream* stream, const mimo_activation_forward_args* args);

typedef struct mimo_activation_backward_args {
  const void* dy;               /* [rows, width] */
  const void* x;                /* of _forward */
  const float* row_probability; /* of _forward, or null = 1 */
  void* dx;                     /* shaped like x */
  float* drow_probability;      /* [rows], written; or null */
  const int32_t* row_count;     /* or null */
  int64_t rows;
  int64_t width;
  int64_t interleave;
  float clamp;
  float linear_offset;
  int32_t kind;
  int32_t dtype;
} mimo_activation_backward_args;
MIMO_API int32_t mimo_activation_backward(mimo_stream* stream, const mimo_activation_backward_args* args);
