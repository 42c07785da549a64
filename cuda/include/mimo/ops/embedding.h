/* Embedding of token ids in a shard of the vocabulary. */
#pragma once

#include "../stream.h"

/* y[t] = scale * table[ids[t] - vocabulary_start], rounded once; zeros for an id outside this shard of vocabulary_rows ids. */
typedef struct mimo_embedding_forward_args {
  const void* table;  /* [vocabulary_rows, width] */
  const int32_t* ids; /* [T] */
  void* y;            /* [T, width] */
  int64_t tokens;
  int64_t width;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  float scale;
  int32_t dtype;
} mimo_embedding_forward_args;
MIMO_API int32_t mimo_embedding_forward(mimo_stream* stream, const mimo_embedding_forward_args* args);

/* dtable[ids[t] - vocabulary_start] += scale * dy[t], for the ids of this shard but `padding_id`. */
typedef struct mimo_embedding_backward_args {
  const void* dy;     /* [T, width] */
  const int32_t* ids; /* [T] */
  float* dtable;      /* [vocabulary_rows, width], added to */
  int64_t tokens;
  int64_t width;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  float scale;
  int32_t padding_id; /* its row gets no gradient; -1: every row has one */
  int32_t dtype;
} mimo_embedding_backward_args;
MIMO_API int32_t mimo_embedding_backward(mimo_stream* stream, const mimo_embedding_backward_args* args);
