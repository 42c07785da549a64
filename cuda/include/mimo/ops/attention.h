/* Attention within packed sequences with grouped query heads, and the decode step for one new token of each sequence. */
#pragma once

#include "../stream.h"

enum mimo_attention_mask { MIMO_ATTENTION_FULL = 0, MIMO_ATTENTION_CAUSAL = 1 };

/* o = softmax(softmax_scale q kᵀ) v within each sequence. Query head i = g * (query_heads / key_heads) + r reads key head g.
 * Element d of query head (g, r) is q[t * token_stride + g * group_stride + r * head_dim + d], of key or value head g
 * k[t * token_stride + g * group_stride + d]: a fused [q…q k v] projection is read in place. Queries and keys have head_dim
 * columns, values and outputs value_dim. Dropout keeps a probability if
 * u >= dropout and divides it by 1 - dropout; u is that of mimo_dropout for the element index
 * ((first_token + token) * full_heads + first_head + query head) * 2^32 + key position in the sequence: the mask does not
 * depend on packing or tensor-parallel layout. With a window, which takes the causal mask, position i sees the keys from
 * i - window + 1 to i. */
typedef struct mimo_attention_forward_args {
  const void* q;
  const void* k;
  const void* v;
  void* o;    /* [T, query_heads * value_dim] contiguous */
  float* lse; /* [T, query_heads]: log-sum-exp of the scaled scores, kept for _backward */
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t max_seqlen; /* upper bound of the sequence lengths */
  int64_t query_heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t value_dim;
  int64_t token_stride;
  int64_t group_stride;
  int64_t dropout_seed;
  int64_t first_token; /* global index of token 0, for dropout */
  int64_t first_head;  /* of query head 0 in the layer, for dropout */
  int64_t full_heads;  /* query heads of the layer, for dropout */
  int64_t window;      /* most keys that a query sees, its own among them; 0: all */
  float softmax_scale;
  float dropout; /* probability; 0: none */
  int32_t mask;  /* MIMO_ATTENTION_* */
  int32_t dtype;
} mimo_attention_forward_args;
MIMO_API int32_t mimo_attention_forward(mimo_stream* stream, const mimo_attention_forward_args* args);

/* dq, dk and dv have the layout of q, k and v, but with the token stride d_token_stride. */
typedef struct mimo_attention_backward_args {
  const void* d_o; /* [T, query_heads * value_dim] */
  const void* q;
  const void* k;
  const void* v;
  const void* o;    /* of _forward */
  const float* lse; /* of _forward */
  void* dq;
  void* dk;
  void* dv;
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t tokens;
  int64_t max_seqlen; /* upper bound of the sequence lengths */
  int64_t query_heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t value_dim;
  int64_t token_stride;
  int64_t group_stride;
  int64_t d_o_stride;     /* elements between tokens of d_o */
  int64_t d_token_stride; /* of dq, dk and dv */
  int64_t dropout_seed;
  int64_t first_token;
  int64_t first_head;
  int64_t full_heads;
  int64_t window;
  float softmax_scale;
  float dropout; /* probability; 0: none */
  int32_t mask;  /* MIMO_ATTENTION_* */
  int32_t dtype;
} mimo_attention_backward_args;
MIMO_API int32_t mimo_attention_backward(mimo_stream* stream, const mimo_attention_backward_args* args);

/* Attention sinks (docs/spec/families.md 2.3): a learned logit of each query head joins the denominators of its softmax, and has no
 * value. Turns o and lse of attention_forward in place into those with sinks: o *= sigmoid(lse - sink) and
 * lse = log(exp(lse) + exp(sink)), from which attention_backward gives the gradients of q, k and v. */
typedef struct mimo_attention_sinks_forward_args {
  void* o;           /* [T, heads * head_dim] contiguous */
  float* lse;        /* [T, heads] */
  const void* sinks; /* [heads] */
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int32_t dtype;
} mimo_attention_sinks_forward_args;
MIMO_API int32_t mimo_attention_sinks_forward(mimo_stream* stream, const mimo_attention_sinks_forward_args* args);

/* dsinks -= Σ exp(sink - lse) (d_o · o) over tokens. */
typedef struct mimo_attention_sinks_backward_args {
  const void* d_o;  /* [T, heads * head_dim] */
  const void* o;    /* of _forward, contiguous */
  const float* lse; /* of _forward */
  const void* sinks;
  float* dsinks; /* [heads], added to */
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t d_o_stride; /* elements between tokens of d_o */
  int32_t dtype;
} mimo_attention_sinks_backward_args;
MIMO_API int32_t mimo_attention_sinks_backward(mimo_stream* stream, const mimo_attention_sinks_backward_args* args);

/* Decode step: causal attention of one new token of each of S sequences. q, k and v have the layout of attention_forward, with
 * one token for each sequence. `keys` and `values` are caches of many sequences: sequence s has lengths[s] rows, from
 * first_rows[s] on. Its new key and value are stored as the next row; its query attends to that row and all before, of
 * which a window leaves window - 1. `values` may be columns of `keys`, with `v` the same columns of `k`. */
typedef struct mimo_attention_step_args {
  const void* q;
  const void* k;
  const void* v;
  void* keys;                /* [key_heads, rows, head_dim] */
  void* values;              /* [key_heads, rows, value_dim], rows value_stride apart */
  const int32_t* first_rows; /* [S] */
  const int32_t* lengths;    /* [S] */
  const void* sinks;         /* [query_heads], as of attention_sinks_forward; or null */
  void* o;                   /* [S, query_heads * value_dim] contiguous */
  int64_t sequences;
  int64_t rows;
  int64_t max_length; /* upper bound of lengths */
  int64_t window;     /* 0: all */
  int64_t query_heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t value_dim;
  int64_t token_stride;
  int64_t group_stride;
  int64_t value_stride; /* elements between rows of `values` */
  float softmax_scale;
  int32_t dtype;
} mimo_attention_step_args;
MIMO_API int32_t mimo_attention_step(mimo_stream* stream, const mimo_attention_step_args* args);

/* Queries, keys and values of latent attention as one projection: per head [q, k, v] with q of `q`, k = [content of `kv`,
 * `position`], v the value of `kv`. All contiguous but `position`. */
typedef struct mimo_latent_heads_forward_args {
  const void* q;        /* [T, heads * (content_dim + position_dim)] */
  const void* kv;       /* [T, heads * (content_dim + value_dim)]: per head content, value */
  const void* position; /* [T, position_dim], of every head's key */
  void* y;              /* [T, heads * (2 (content_dim + position_dim) + value_dim)] */
  int64_t tokens;
  int64_t heads;
  int64_t content_dim;
  int64_t position_dim;
  int64_t value_dim;
  int64_t position_stride;
  int32_t dtype; /* f32 or bf16 */
} mimo_latent_heads_forward_args;
MIMO_API int32_t mimo_latent_heads_forward(mimo_stream* stream, const mimo_latent_heads_forward_args* args);

/* Gradients of _forward; that of `position` is a sum over the heads, in fp32. */
typedef struct mimo_latent_heads_backward_args {
  const void* dy; /* shaped like y, as the others like theirs; all contiguous but dposition */
  void* dq;
  void* dkv;
  void* dposition;
  int64_t tokens;
  int64_t heads;
  int64_t content_dim;
  int64_t position_dim;
  int64_t value_dim;
  int64_t position_stride; /* of dposition */
  int32_t dtype;
} mimo_latent_heads_backward_args;
MIMO_API int32_t mimo_latent_heads_backward(mimo_stream* stream, const mimo_latent_heads_backward_args* args);
