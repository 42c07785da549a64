/* Mamba-2. */
#pragma once

#include "../stream.h"

/* Depthwise causal convolution and SiLU: p[t,c] = bias[c] + Σ_k weight[c,k] x[t - width + 1 + k, c], y = p σ(p).
 * Taps left of a sequence's first token are zero. */
typedef struct mimo_causal_conv1d_forward_args {
  const void* x;      /* [T, channels] */
  const void* weight; /* [channels, width] */
  const void* bias;   /* [channels] */
  void* y;
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t channels;
  int64_t width;
  int64_t x_stride;
  int64_t y_stride;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_causal_conv1d_forward_args;
MIMO_API int32_t mimo_causal_conv1d_forward(mimo_stream* stream, const mimo_causal_conv1d_forward_args* args);

typedef struct mimo_causal_conv1d_backward_args {
  const void* dy;
  const void* x;
  const void* weight;
  const void* bias;
  void* dx;
  float* dweight; /* [channels, width], or null */
  float* dbias;   /* [channels], or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t channels;
  int64_t width;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t dx_stride;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_causal_conv1d_backward_args;
MIMO_API int32_t mimo_causal_conv1d_backward(mimo_stream* stream, const mimo_causal_conv1d_backward_args* args);

/* Causal convolution of one more token of S sequences: `state` holds the last width - 1 inputs of many sequences, oldest
 * first, those of sequence s at slots[s]; they move on by one. No two slots are equal. */
typedef struct mimo_causal_conv1d_step_args {
  const void* x;        /* [S, channels] */
  const void* weight;   /* [channels, width] */
  const void* bias;     /* [channels] */
  void* state;          /* [.., width - 1, channels], of x's dtype */
  const int32_t* slots; /* [S] */
  void* y;              /* [S, channels] */
  int64_t sequences;
  int64_t channels;
  int64_t width;
  int64_t x_stride;
  int64_t y_stride;
  int32_t dtype;
  int32_t weight_dtype;
} mimo_causal_conv1d_step_args;
MIMO_API int32_t mimo_causal_conv1d_step(mimo_stream* stream, const mimo_causal_conv1d_step_args* args);

/* Mamba-2 state space scan with its gate (docs/spec/language-model.md §2.2, §2.3). Per head j of group j / (H/G):
 *   Δ = max(softplus(dt + dt_bias), dt_minimum),  a = -exp(A_log) Δ,  h_t = exp(a_t) h_{t-1} + Δ_t x_t ⊗ B_t,  y_t = h_t C_t + D x_t
 *   o = y silu(z_factors z). The state starts at zero in every sequence. */
typedef struct mimo_ssd_forward_args {
  const void* x;        /* [T, H P] */
  const void* b;        /* [T, G N] */
  const void* c;        /* [T, G N] */
  const void* z;        /* [T, H P] */
  const void* dt;       /* [T, H] before bias and softplus */
  const float* dt_bias; /* [H] */
  const float* a_log;   /* [H] */
  const float* d;       /* [H] */
  const float* z_factors; /* [H P], or null = 1 */
  void* o;              /* [T, H P] contiguous, gated output */
  void* y;              /* [T, H P] contiguous, output before the gate, kept for backward; or null */
  float* final_state;   /* [S, H, P, N] the state after the last token of every sequence; or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_dim;
  int64_t chunk_size; /* at most; no result depends on it but for rounding */
  int64_t xbc_stride; /* row stride of x, b and c */
  int64_t z_stride;
  int64_t dt_stride;
  float dt_minimum; /* 0: no limit; where it holds, Δ has no gradient */
  int32_t dtype;
} mimo_ssd_forward_args;
MIMO_API int32_t mimo_ssd_forward(mimo_stream* stream, const mimo_ssd_forward_args* args);

typedef struct mimo_ssd_backward_args {
  const void* d_o; /* [T, H P] contiguous */
  const void* x;
  const void* b;
  const void* c;
  const void* z;
  const void* dt;
  const void* y; /* as saved by forward */
  const float* dt_bias;
  const float* a_log;
  const float* d;
  const float* z_factors; /* or null */
  void* dx; /* strides as dxbc_stride */
  void* db;
  void* dc;
  void* dz;        /* stride dz_stride */
  void* ddt;       /* stride ddt_stride */
  float* ddt_bias; /* [H], or null */
  float* da_log;   /* [H], or null */
  float* dd;       /* [H], or null */
  float* dz_factors; /* [H P], or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_dim;
  int64_t chunk_size; /* at most; no result depends on it but for rounding */
  int64_t xbc_stride;
  int64_t z_stride;
  int64_t dt_stride;
  int64_t dxbc_stride;
  int64_t dz_stride;
  int64_t ddt_stride;
  float dt_minimum;
  int32_t dtype;
} mimo_ssd_backward_args;
MIMO_API int32_t mimo_ssd_backward(mimo_stream* stream, const mimo_ssd_backward_args* args);

/* The scan of ssd_forward for one more token of S sequences: `state` holds the states of many, as ssd_forward leaves them, the
 * state of sequence s at slots[s]; it moves on by one token. No two slots are equal. */
typedef struct mimo_ssd_step_args {
  const void* x;        /* [S, H P] */
  const void* b;        /* [S, G N] */
  const void* c;        /* [S, G N] */
  const void* z;        /* [S, H P] */
  const void* dt;       /* [S, H] before bias and softplus */
  const float* dt_bias; /* [H] */
  const float* a_log;   /* [H] */
  const float* d;       /* [H] */
  float* state;         /* [.., H, P, N] */
  const int32_t* slots; /* [S] */
  void* o;              /* [S, H P] contiguous, gated output */
  int64_t sequences;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_dim;
  int64_t xbc_stride; /* row stride of x, b and c */
  int64_t z_stride;
  int64_t dt_stride;
  float dt_minimum;
  int32_t dtype;
} mimo_ssd_step_args;
MIMO_API int32_t mimo_ssd_step(mimo_stream* stream, const mimo_ssd_step_args* args);
