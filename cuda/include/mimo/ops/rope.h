/* Rotary position embedding. */
#pragma once

#include "../stream.h"

/* Rotary position embedding: the first rotary_dim columns [x₁ x₂] of a head become [x₁ cos - x₂ sin, x₂ cos + x₁ sin],
 * halves of rotary_dim / 2 columns, angle_i = angle_scale * position * base^(-2i / rotary_dim). Positions restart with
 * every sequence, from 0 or where first_positions says. A token is `groups` groups of heads_per_group heads. The first
 * rotated_per_group heads of a group turn; the others (values) and columns past rotary_dim are copied. angle_scale -1 turns back: the gradient. y may be x. */
typedef struct mimo_rope_forward_args {
  const void* x;
  void* y;
  const int32_t* cu_seqlens;
  const int32_t* first_positions; /* [sequences] position of a sequence's first token here; or null = 0 */
  int64_t sequences;
  int64_t tokens;
  int64_t max_seqlen;
  int64_t groups;
  int64_t heads_per_group;
  int64_t rotated_per_group;
  int64_t head_dim;
  int64_t rotary_dim;
  int64_t x_stride;
  int64_t y_stride;
  float base;
  float angle_scale;
  int32_t dtype;
} mimo_rope_forward_args;
MIMO_API int32_t mimo_rope_forward(mimo_stream* stream, const mimo_rope_forward_args* args);
