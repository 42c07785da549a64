/* Losses over a vocabulary that ranks may share. */
#pragma once

#include "../stream.h"

/* Per row of this shard of the vocabulary: maximum, Σ exp(l - maximum), and the label's logit (0 and found = 0 when
 * another shard owns it). Columns at or beyond vocabulary_live (padding) do not exist. */
typedef struct mimo_cross_entropy_statistics_args {
  const void* logits; /* [T, vocabulary_rows] */
  const int32_t* labels;
  float* maximum;      /* [T] */
  float* sum_exp;      /* [T] */
  float* target_logit; /* [T] */
  int32_t* found;      /* [T] */
  int64_t tokens;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  int64_t vocabulary_live; /* rows of this shard that are real */
  int32_t dtype;
} mimo_cross_entropy_statistics_args;
MIMO_API int32_t mimo_cross_entropy_statistics(mimo_stream* stream, const mimo_cross_entropy_statistics_args* args);

/* Combines the statistics of `shards` vocabulary shards, [shards, T] each. lse = log Σ exp. A label that no shard owns
 * (such as -100) counts as a logit equal to the row maximum, as in Megatron. loss = lse - target + z_loss lse². */
typedef struct mimo_cross_entropy_loss_args {
  const float* maximum;
  const float* sum_exp;
  const float* target_logit;
  const int32_t* found;
  float* loss; /* [T] */
  float* lse;  /* [T] */
  int64_t tokens;
  int64_t shards;
  float z_loss;
} mimo_cross_entropy_loss_args;
MIMO_API int32_t mimo_cross_entropy_loss(mimo_stream* stream, const mimo_cross_entropy_loss_args* args);

/* dlogits = dloss[t] * ((1 + 2 z_loss lse) softmax - [v = label]); dlogits may be logits itself. Padding columns get
 * zero. round_bf16 = 1 rounds the gradient to bf16 whatever the dtype, as Megatron's fused loss does. */
typedef struct mimo_cross_entropy_backward_args {
  const void* logits;
  const int32_t* labels;
  const float* lse;
  const float* dloss; /* [T] */
  void* dlogits;
  int64_t tokens;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  int64_t vocabulary_live;
  float z_loss;
  int32_t round_bf16;
  int32_t dtype;
} mimo_cross_entropy_backward_args;
MIMO_API int32_t mimo_cross_entropy_backward(mimo_stream* stream, const mimo_cross_entropy_backward_args* args);

/* Statistics of a vocabulary shard for the divergence of a student from a teacher (docs/spec/elastic.md §11). Per token, over
 * the live columns of s = student / temperature and t = teacher / temperature: max s, sum exp(s - max s), max t,
 * sum exp(t - max t), sum exp(t - max t) (t - s). */
typedef struct mimo_kl_statistics_args {
  const void* student; /* [T, vocabulary_rows] */
  const void* teacher; /* [T, vocabulary_rows] */
  float* statistics;   /* [5, T] */
  int64_t tokens;
  int64_t vocabulary_rows;
  int64_t vocabulary_live; /* columns from here on do not exist */
  float inverse_temperature;
  int32_t student_dtype;
  int32_t teacher_dtype;
} mimo_kl_statistics_args;
MIMO_API int32_t mimo_kl_statistics(mimo_stream* stream, const mimo_kl_statistics_args* args);

/* loss = sum over the vocabulary of P_t (log P_t - log P_s), from the statistics of all shards. */
typedef struct mimo_kl_loss_args {
  const float* statistics; /* [shards, 5, T] */
  float* loss;             /* [T] */
  float* student_lse;      /* [T] */
  float* teacher_lse;      /* [T] */
  int64_t tokens;
  int64_t shards;
} mimo_kl_loss_args;
MIMO_API int32_t mimo_kl_loss(mimo_stream* stream, const mimo_kl_loss_args* args);

/* dlogits = dloss (P_s - P_t) / temperature, 0 in columns that do not exist. dlogits may be the student's memory. */
typedef struct mimo_kl_backward_args {
  const void* student;
  const void* teacher;
  const float* student_lse; /* [T] */
  const float* teacher_lse; /* [T] */
  const float* dloss;       /* [T] */
  void* dlogits;            /* of the student's type */
  int64_t tokens;
  int64_t vocabulary_rows;
  int64_t vocabulary_live;
  float inverse_temperature;
  int32_t student_dtype;
  int32_t teacher_dtype;
} mimo_kl_backward_args;
MIMO_API int32_t mimo_kl_backward(mimo_stream* stream, const mimo_kl_backward_args* args);
