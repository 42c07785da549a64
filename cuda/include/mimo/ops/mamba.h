/* Mamba-2: causal conv1d and chunk scan (SSD) for packed sequences, and their decode steps. */
#pragma once

#include "../stream.h"

/* Depthwise causal convolution and SiLU: p[t,c] = bias[c] + Σ_k weight[c,k] x[t - width + 1 + k, c], y = p σ(p). Inputs
 * before a sequence's first token are zeros. On GPUs `width` is at most 8. */
typedef struct mimo_causal_conv1d_forward_args {
  const void* x;      /* [T, channels] */
  const void* weight; /* [channels, width] */
  const void* bias;   /* [channels], or null = 0 */
  void* y;            /* [T, channels] */
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
  const void* dy; /* [T, channels] */
  const void* x;  /* of _forward, as are weight and bias */
  const void* weight;
  const void* bias;
  void* dx;       /* [T, channels] */
  float* dweight; /* [channels, width], added to; or null */
  float* dbias;   /* [channels], added to; or null */
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

/* Decode step of causal_conv1d_forward: one new token of each of S sequences. `state` holds the last width - 1 inputs of many
 * sequences, oldest first, those of sequence s at slots[s]; x replaces the oldest. Slots are distinct. */
typedef struct mimo_causal_conv1d_step_args {
  const void* x;        /* [S, channels] */
  const void* weight;   /* [channels, width] */
  const void* bias;     /* [channels], or null = 0 */
  void* state;          /* [.., width - 1, channels], in `dtype` */
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

/* Chunk scan (SSD) and gate (docs/spec/language-model.md §2.2, §2.3). For head j of group j / (H/G):
 *   Δ = max(softplus(dt + dt_bias), dt_minimum),  a = -exp(A_log) Δ,  h_t = exp(a_t) h_{t-1} + Δ_t x_t ⊗ B_t,  y_t = h_t C_t + D x_t
 *   o = y silu(z_factors z). The state starts at zero in every sequence. */
typedef struct mimo_ssd_forward_args {
  const void* x;          /* [T, H P] */
  const void* b;          /* [T, G N] */
  const void* c;          /* [T, G N] */
  const void* z;          /* [T, H P] */
  const void* dt;         /* [T, H] before bias and softplus */
  const float* dt_bias;   /* [H] */
  const float* a_log;     /* [H] */
  const float* d;         /* [H] */
  const float* z_factors; /* [H P], or null = 1 */
  void* o;                /* [T, H P] contiguous, gated output */
  void* y;                /* [T, H P] contiguous, output before the gate, kept for _backward; or null */
  float* final_state;     /* [S, H, P, N]: the state after the last token of each sequence, zeros without tokens; or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_dim;
  int64_t chunk_size; /* longest chunk; affects results by rounding only */
  int64_t xbc_stride; /* row stride of x, b and c */
  int64_t z_stride;
  int64_t dt_stride;
  float dt_minimum; /* 0: no limit; at the limit Δ has no gradient */
  int32_t dtype;
} mimo_ssd_forward_args;
MIMO_API int32_t mimo_ssd_forward(mimo_stream* stream, const mimo_ssd_forward_args* args);

typedef struct mimo_ssd_backward_args {
  const void* d_o; /* [T, H P] contiguous */
  const void* x;   /* of _forward, as is all below up to z_factors */
  const void* b;
  const void* c;
  const void* z;
  const void* dt;
  const void* y; /* written by _forward */
  const float* dt_bias;
  const float* a_log;
  const float* d;
  const float* z_factors; /* or null */
  void* dx;               /* [T, H P], stride dxbc_stride, as for db and dc */
  void* db;               /* [T, G N] */
  void* dc;               /* [T, G N] */
  void* dz;               /* [T, H P], stride dz_stride */
  void* ddt;              /* [T, H], stride ddt_stride */
  float* ddt_bias;        /* [H], added to; or null */
  float* da_log;          /* [H], added to; or null */
  float* dd;              /* [H], added to; or null */
  float* dz_factors;      /* [H P], added to; or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_dim;
  int64_t chunk_size; /* longest chunk; affects results by rounding only */
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

/* Decode step of ssd_forward: one new token of each of S sequences, without z_factors. `state` holds the states of many
 * sequences in the layout of final_state of ssd_forward, that of sequence s at slots[s], and is updated in place. Slots are
 * distinct. */
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
