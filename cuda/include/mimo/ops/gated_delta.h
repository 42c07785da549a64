/* Gated DeltaNet: the gated delta rule for packed sequences, its decode step, and the gate of its output. */
#pragma once

#include "../stream.h"

/* The gated delta rule (docs/spec/families.md §2.5). For value head j of key head i = ⌊j H_k / H_v⌋:
 *   q̂ = q (Σ q² + 1e-6)^(-1/2) D_k^(-1/2),  k̂ = k (Σ k² + 1e-6)^(-1/2),  β = σ(b),  g = -exp(A_log) softplus(a + dt_bias)
 *   S̃ = exp(g_t) S_{t-1},  S_t = S̃ + k̂_t (β_t (v_t - S̃ᵀ k̂_t))ᵀ,  o_t = S_tᵀ q̂_t. The state S starts at zero in every sequence.
 * All in fp32. H_k, H_v: key and value heads; D_k, D_v: their widths. */
typedef struct mimo_gated_delta_forward_args {
  const void* q;        /* [T, H_k D_k] */
  const void* k;        /* [T, H_k D_k] */
  const void* v;        /* [T, H_v D_v] */
  const void* b;        /* [T, H_v] */
  const void* a;        /* [T, H_v] */
  const float* dt_bias; /* [H_v] */
  const float* a_log;   /* [H_v] */
  void* o;              /* [T, H_v D_v] contiguous */
  float* final_state;   /* [S, H_v, D_k, D_v]: the state after the last token of each sequence, zeros without tokens; or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t key_heads;
  int64_t value_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t qkv_stride; /* row stride of q, k and v */
  int64_t ba_stride;  /* row stride of b and a */
  int32_t dtype;
} mimo_gated_delta_forward_args;
MIMO_API int32_t mimo_gated_delta_forward(mimo_stream* stream, const mimo_gated_delta_forward_args* args);

typedef struct mimo_gated_delta_backward_args {
  const void* d_o; /* [T, H_v D_v] contiguous */
  const void* q;   /* of _forward, as is all below up to a_log */
  const void* k;
  const void* v;
  const void* b;
  const void* a;
  const float* dt_bias;
  const float* a_log;
  void* dq;        /* [T, H_k D_k], stride dqkv_stride, as for dk and dv */
  void* dk;        /* [T, H_k D_k] */
  void* dv;        /* [T, H_v D_v] */
  void* db;        /* [T, H_v], stride dba_stride, as for da */
  void* da;        /* [T, H_v] */
  float* ddt_bias; /* [H_v], added to; or null */
  float* da_log;   /* [H_v], added to; or null */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t key_heads;
  int64_t value_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t qkv_stride;
  int64_t ba_stride;
  int64_t dqkv_stride;
  int64_t dba_stride;
  int32_t dtype;
} mimo_gated_delta_backward_args;
MIMO_API int32_t mimo_gated_delta_backward(mimo_stream* stream, const mimo_gated_delta_backward_args* args);

/* Decode step of gated_delta_forward: one new token of each of S sequences. `state` holds the states of many sequences in the
 * layout of final_state of gated_delta_forward, that of sequence s at slots[s], and is updated in place. Slots are distinct. */
typedef struct mimo_gated_delta_step_args {
  const void* q; /* [S, H_k D_k] */
  const void* k; /* [S, H_k D_k] */
  const void* v; /* [S, H_v D_v] */
  const void* b; /* [S, H_v] */
  const void* a; /* [S, H_v] */
  const float* dt_bias;
  const float* a_log;
  float* state;         /* [.., H_v, D_k, D_v] */
  const int32_t* slots; /* [S] */
  void* o;              /* [S, H_v D_v] contiguous */
  int64_t sequences;
  int64_t key_heads;
  int64_t value_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t qkv_stride;
  int64_t ba_stride;
  int32_t dtype;
} mimo_gated_delta_step_args;
MIMO_API int32_t mimo_gated_delta_step(mimo_stream* stream, const mimo_gated_delta_step_args* args);

enum mimo_gate {
  MIMO_GATE_SIGMOID = 0, /* σ(gate) */
  MIMO_GATE_SILU = 1     /* gate σ(gate) */
};

/* y = x f(gate), in fp32 with one rounding. */
typedef struct mimo_gate_forward_args {
  const void* x;    /* [rows, width] */
  const void* gate; /* [rows, width] */
  void* y;          /* [rows, width] */
  int64_t rows;
  int64_t width;
  int64_t x_stride;
  int64_t gate_stride;
  int64_t y_stride;
  int32_t kind; /* MIMO_GATE_* */
  int32_t dtype;
} mimo_gate_forward_args;
MIMO_API int32_t mimo_gate_forward(mimo_stream* stream, const mimo_gate_forward_args* args);

typedef struct mimo_gate_backward_args {
  const void* dy;   /* [rows, width] */
  const void* x;    /* of _forward, as is gate */
  const void* gate;
  void* dx;         /* [rows, width] */
  void* dgate;      /* [rows, width] */
  int64_t rows;
  int64_t width;
  int64_t dy_stride;
  int64_t x_stride;
  int64_t gate_stride;
  int64_t dx_stride;
  int64_t dgate_stride;
  int32_t kind;
  int32_t dtype;
} mimo_gate_backward_args;
MIMO_API int32_t mimo_gate_backward(mimo_stream* stream, const mimo_gate_backward_args* args);
