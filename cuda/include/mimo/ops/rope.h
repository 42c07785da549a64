/* Rotary position embedding. */
#pragma once

#include "../stream.h"

/* rotary_dim columns of a head from first_column on, pairs (x₁, x₂), become (x₁ cos - x₂ sin, x₂ cos + x₁ sin) with
 * angle_i = angle_scale * position * base^(-2i / rotary_dim) for pair i: columns i and rotary_dim / 2 + i, or, interleaved,
 * 2i and 2i + 1. Positions count from 0 in every sequence, or from first_positions; cosines and sines are multiplied by
 * amplitude. A token is `groups` groups of heads_per_group heads of head_dim columns. The first rotated_per_group heads of a
 * group are rotated; its other heads (values), and its other columns, are copied. The gradient is the same
 * operation with angle_scale negated. y may be x. */
typedef struct mimo_rope_forward_args {
  const void* x; /* [T, groups * heads_per_group * head_dim] */
  void* y;       /* shaped like x */
  const int32_t* cu_seqlens;
  const int32_t* first_positions; /* [sequences], the position of each sequence's first token; or null = 0 */
  const double* frequencies;      /* [rotary_dim / 2], radians a position; or null: base^(-2i / rotary_dim) */
  int64_t sequences;
  int64_t tokens;
  int64_t max_seqlen; /* upper bound of the sequence lengths */
  int64_t groups;
  int64_t heads_per_group;
  int64_t rotated_per_group;
  int64_t head_dim;
  int64_t rotary_dim;   /* even, at most head_dim - first_column */
  int64_t first_column;
  int64_t x_stride;
  int64_t y_stride;
  float base;
  float angle_scale;
  float amplitude; /* of every cosine and sine: 1, or YaRN's attention factor */
  int32_t interleaved; /* 1: a pair's columns are neighbours */
  int32_t dtype;
} mimo_rope_forward_args;
MIMO_API int32_t mimo_rope_forward(mimo_stream* stream, const mimo_rope_forward_args* args);
