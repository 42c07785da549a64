/* Embedding tables. */
#pragma once

#include "../stream.h"

/* y[t] = table[ids[t] - vocabulary_start]; a foreign id gives zeros. */
typedef struct mimo_embedding_forward_args {
  const void* table; /* [vocabulary_rows, width] */
  const int32_t* ids;
  void* y;
  int64_t tokens;
  int64_t width;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  int32_t dtype;
} mimo_embedding_forward_args;
MIMO_API int32_t mimo_embedding_forward(mimo_stream* stream, const mimo_embedding_forward_args* args);

typedef struct mimo_embedding_backward_args {
  const void* dy;
  const int32_t* ids;
  float* dtable; /* [vocabulary_rows, width] */
  int64_t tokens;
  int64_t width;
  int64_t vocabulary_start;
  int64_t vocabulary_rows;
  int32_t dtype;
} mimo_embedding_backward_args;
MIMO_API int32_t mimo_embedding_backward(mimo_stream* stream, const mimo_embedding_backward_args* args);
