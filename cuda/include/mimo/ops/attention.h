/* Attention. */
#pragma once

#include "../stream.h"

enum mimo_attention_mask { MIMO_ATTENTION_FULL = 0, MIMO_ATTENTION_CAUSAL = 1 };

/* Attention within each sequence. Query head i = g * (query_heads / key_heads) + r reads key head g. Element of query
 * head (g, r): q[t * token_stride + g * group_stride + r * head_dim + d]; of key or value head g:
 * k[t * token_stride + g * group_stride + d]: a fused [q…q k v] projection is read in place.
 * Dropout keeps a probability where u >= dropout, u of the word mimo_dropout would take for the element index
 * ((first_token + token) * full_heads + first_head + query head) * 2^32 + key position in the sequence: the mask is
 * the same under every packing and tensor-parallel layout. */
typedef struct mimo_attention_forward_args {
  const void* q;
  const void* k;
  const void* v;
  void* o;    /* [T, query_heads * head_dim] contiguous */
  float* lse; /* [T, query_heads] log-sum-exp of the scaled scores, kept for backward */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t max_seqlen;
  int64_t query_heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t token_stride;
  int64_t group_stride;
  int64_t dropout_seed;
  int64_t first_token; /* global index of token 0, for dropout */
  int64_t first_head;  /* of query head 0 in the layer, for dropout */
  int64_t full_heads;  /* query heads of the layer, for dropout */
  float softmax_scale;
  float dropout;
  int32_t mask;
  int32_t dtype;
} mimo_attention_forward_args;
MIMO_API int32_t mimo_attention_forward(mimo_stream* stream, const mimo_attention_forward_args* args);

/* dq, dk, dv lie like q, k, v, with a token stride of their own; all of them are written. */
typedef struct mimo_attention_backward_args {
  const void* d_o;
  const void* q;
  const void* k;
  const void* v;
  const void* o;
  const float* lse;
  void* dq;
  void* dk;
  void* dv;
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t max_seqlen;
  int64_t query_heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t token_stride;
  int64_t group_stride;
  int64_t d_o_stride;     /* elements between tokens of d_o */
  int64_t d_token_stride; /* of dq, dk and dv */
  int64_t dropout_seed;
  int64_t first_token;
  int64_t first_head;
  int64_t full_heads;
  float softmax_scale;
  float dropout;
  int32_t mask;
  int32_t dtype;
} mimo_attention_backward_args;
MIMO_API int32_t mimo_attention_backward(mimo_stream* stream, const mimo_attention_backward_args* args);

/* Causal attention of one more token of S sequences. q, k and v lie as in attention_forward, a token a sequence. `keys` and
 * `values` hold the tokens of many sequences, a run of rows each: those of sequence s from first_rows[s] on, lengths[s] of
 * them so far. Its new key and value become the next row; its query sees them and all before. */
typedef struct mimo_attention_step_args {
  const void* q;
  const void* k;
  const void* v;
  void* keys;                /* [key_heads, rows, head_dim] */
  void* values;              /* [key_heads, rows, head_dim] */
  const int32_t* first_rows; /* [S] */
  const int32_t* lengths;    /* [S] */
  void* o;                   /* [S, query_heads * head_dim] contiguous */
  int64_t sequences;
  int64_t rows;
  int64_t max_length; /* no length is greater */
  int64_t query_heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t token_stride;
  int64_t group_stride;
  float softmax_scale;
  int32_t dtype;
} mimo_attention_step_args;
MIMO_API int32_t mimo_attention_step(mimo_stream* stream, const mimo_attention_step_args* args);
