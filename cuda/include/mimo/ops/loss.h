/* Cross entropy and KL divergence over a vocabulary sharded over ranks: statistics, loss, gradient. */
#pragma once

#include "../stream.h"

/* For each token, over the logits l of this shard of the vocabulary: the maximum, Σ exp(l - maximum), and the label's logit,
 * or 0 with found = 0 if the label is not in this shard. Columns from vocabulary_live on are padding and not read. */
typedef struct mimo_cross_entropy_statistics_args {
  const void* logits;    /* [T, vocabulary_rows] */
  const int32_t* labels; /* [T] */
  float* maximum;        /* [T] */
  float* sum_exp;        /* [T] */
  float* target_logit;   /* [T] */
  int32_t* found;        /* [T] */
  int64_t tokens;
  int64_t vocabulary_start; /* id of the shard's first column */
  int64_t vocabulary_rows;  /* columns of the shard */
  int64_t vocabulary_live;  /* columns that are not padding */
  int32_t dtype;
} mimo_cross_entropy_statistics_args;
MIMO_API int32_t mimo_cross_entropy_statistics(mimo_stream* stream, const mimo_cross_entropy_statistics_args* args);

/* loss = lse - target + z_loss lse², lse = log Σ exp(l), from the statistics of all shards. A label in no shard (such as
 * -100) has the maximum as its logit, as in Megatron. */
typedef struct mimo_cross_entropy_loss_args {
  const float* maximum; /* [shards, T], as the three below */
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

/* dlogits[t][v] = dloss[t] * ((1 + 2 z_loss lse) softmax - [v = label]), zero in padding columns; dlogits may alias
 * logits. */
typedef struct mimo_cross_entropy_backward_args {
  const void* logits;    /* [T, vocabulary_rows] */
  const int32_t* labels; /* [T] */
  const float* lse;      /* [T] */
  const float* dloss;    /* [T] */
  void* dlogits;         /* [T, vocabulary_rows] */
  int64_t tokens;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  int64_t vocabulary_live;
  float z_loss;
  int32_t round_bf16; /* 1: the gradient is rounded to bf16 whatever the dtype, as Megatron's fused loss does */
  int32_t dtype;
} mimo_cross_entropy_backward_args;
MIMO_API int32_t mimo_cross_entropy_backward(mimo_stream* stream, const mimo_cross_entropy_backward_args* args);

/* Statistics of a vocabulary shard for the KL divergence of a student from a teacher (docs/spec/elastic.md §11): for each token,
 * over the first vocabulary_live columns of s = student / temperature and t = teacher / temperature: max s, Σ exp(s - max s),
 * max t, Σ exp(t - max t), Σ exp(t - max t) (t - s). */
typedef struct mimo_kl_statistics_args {
  const void* student; /* [T, vocabulary_rows] */
  const void* teacher; /* [T, vocabulary_rows] */
  float* statistics;   /* [5, T] */
  int64_t tokens;
  int64_t vocabulary_rows;
  int64_t vocabulary_live; /* columns that are not padding */
  float inverse_temperature;
  int32_t student_dtype;
  int32_t teacher_dtype;
} mimo_kl_statistics_args;
MIMO_API int32_t mimo_kl_statistics(mimo_stream* stream, const mimo_kl_statistics_args* args);

/* loss = Σ P_t (log P_t - log P_s) over the vocabulary, from the statistics of all shards. */
typedef struct mimo_kl_loss_args {
  const float* statistics; /* [shards, 5, T] */
  float* loss;             /* [T] */
  float* student_lse;      /* [T] */
  float* teacher_lse;      /* [T] */
  int64_t tokens;
  int64_t shards;
} mimo_kl_loss_args;
MIMO_API int32_t mimo_kl_loss(mimo_stream* stream, const mimo_kl_loss_args* args);

/* dlogits = dloss (P_s - P_t) / temperature, 0 in padding columns. dlogits may alias `student`. */
typedef struct mimo_kl_backward_args {
  const void* student;      /* [T, vocabulary_rows] */
  const void* teacher;      /* [T, vocabulary_rows] */
  const float* student_lse; /* [T] */
  const float* teacher_lse; /* [T] */
  const float* dloss;       /* [T] */
  void* dlogits;            /* [T, vocabulary_rows], in student_dtype */
  int64_t tokens;
  int64_t vocabulary_rows;
  int64_t vocabulary_live;
  float inverse_temperature;
  int32_t student_dtype;
  int32_t teacher_dtype;
} mimo_kl_backward_args;
MIMO_API int32_t mimo_kl_backward(mimo_stream* stream, const mimo_kl_backward_args* args);

/* How far a student's hidden states are from a teacher's (docs/spec/elastic.md §11), for each token: with `cosine`
 * 1 - s·t / sqrt((s·s + 1e-12) (t·t + 1e-12)), without it the mean of (s - t)². */
typedef struct mimo_hidden_loss_forward_args {
  const void* student; /* [T, width] */
  const void* teacher; /* [T, width] */
  float* loss;         /* [T] */
  int64_t tokens;
  int64_t width;
  int32_t cosine;
  int32_t student_dtype;
  int32_t teacher_dtype;
} mimo_hidden_loss_forward_args;
MIMO_API int32_t mimo_hidden_loss_forward(mimo_stream* stream, const mimo_hidden_loss_forward_args* args);

/* dstudent = factor dloss times the loss's derivative. */
typedef struct mimo_hidden_loss_backward_args {
  const void* student; /* [T, width] */
  const void* teacher; /* [T, width] */
  const float* dloss;  /* [T] */
  void* dstudent;      /* [T, width], in student_dtype */
  int64_t tokens;
  int64_t width;
  float factor;
  int32_t cosine;
  int32_t student_dtype;
  int32_t teacher_dtype;
} mimo_hidden_loss_backward_args;
MIMO_API int32_t mimo_hidden_loss_backward(mimo_stream* stream, const mimo_hidden_loss_backward_args* args);
