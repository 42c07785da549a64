/* Routing of tokens to experts. */
#pragma once

#include "../stream.h"

enum mimo_score_function { MIMO_SCORE_SIGMOID = 0, MIMO_SCORE_SOFTMAX = 1 };

/* Scores, top-k selection and routing weights (docs/spec/language-model.md §4.2), and the statistics of the balancing
 * loss (§4.4: from unbiased normalised scores, counted per sequence). Ties go to the lower expert index. softmax: after
 * top-k over the selected logits, or before it when pre_softmax = 1. Padding tokens are routed like any other, but stay
 * out of every count and sum. The three sequence_ arrays are given together or not at all. */
typedef struct mimo_router_forward_args {
  const float* logits;         /* [T, E] */
  const float* expert_bias;    /* [E], or null; sigmoid only */
  const uint8_t* padding_mask; /* [T] 1 = padding, or null */
  const int32_t* cu_seqlens;   /* read for the sequence_ arrays only; null without them */
  float* scores;               /* [T, E]: sigmoid, or full softmax */
  float* probabilities;        /* [T, K] routing weights */
  int32_t* expert_index;       /* [T, K] ascending expert index per token */
  int32_t* tokens_per_expert;  /* [E], added to; or null */
  float* sequence_counts;      /* [S, E] tokens whose unbiased top-k holds e; or null */
  float* sequence_score_sums;  /* [S, E] Σ_t of the normalised scores; or null */
  float* sequence_tokens;      /* [S] tokens that are not padding; or null */
  int64_t sequences;
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  int64_t expert_groups; /* 1 = no group limit */
  int64_t group_topk;
  /* A group's score is the sum of this many best values of those that decide the choice: biased sigmoid scores,
   * probabilities with pre_softmax = 1, logits with softmax after top-k. topk / group_topk in Megatron, 2 in HF. */
  int64_t group_score_topk;
  float scaling_factor;
  int32_t score_function;
  int32_t pre_softmax;
} mimo_router_forward_args;
MIMO_API int32_t mimo_router_forward(mimo_stream* stream, const mimo_router_forward_args* args);

/* loss += coefficient E / (K sequences) Σ_q Σ_e counts[q,e] sums[q,e] / tokens_q², tokens_q = sequence_tokens[q] times
 * sequence_shards; a sequence without tokens adds nothing. dnormalised[q,e] += gradient_scale * ∂loss/∂(one token's
 * normalised score). With sequences = 1 (the whole microbatch as one) every row of dnormalised gets the same. */
typedef struct mimo_router_balancing_loss_args {
  const float* sequence_counts;
  const float* sequence_score_sums;
  const float* sequence_tokens;
  float* dnormalised; /* [dnormalised_rows, E], added to; or null */
  float* loss;        /* [1], added to; or null */
  int64_t dnormalised_rows; /* sequences, unless that is 1 */
  int64_t sequences;
  int64_t experts;
  int64_t topk;
  int64_t sequence_shards;
  float coefficient;
  float gradient_scale;
} mimo_router_balancing_loss_args;
MIMO_API int32_t mimo_router_balancing_loss(mimo_stream* stream, const mimo_router_balancing_loss_args* args);

/* z_loss += Σ_t logsumexp(logits_t)² over the tokens that are not padding (not yet divided or weighted). */
typedef struct mimo_router_z_loss_args {
  const float* logits;
  const uint8_t* padding_mask; /* or null */
  float* z_loss; /* [1], added to */
  int64_t tokens;
  int64_t experts;
} mimo_router_z_loss_args;
MIMO_API int32_t mimo_router_z_loss(mimo_stream* stream, const mimo_router_z_loss_args* args);

typedef struct mimo_router_backward_args {
  const float* logits;
  const float* scores;
  const float* probabilities;
  const int32_t* expert_index;
  const float* dprobabilities; /* [T, K] */
  const float* dnormalised;    /* [S, E] from the balancing loss, or null */
  const uint8_t* padding_mask; /* or null; padding tokens get no gradient from dnormalised and the z-loss */
  const int32_t* cu_seqlens;   /* null when dnormalised is */
  float* dlogits;              /* [T, E] */
  int64_t sequences;
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  float scaling_factor;
  float z_loss_scale; /* gradient of Σ logsumexp² is multiplied by this; 0 = no z-loss */
  int32_t score_function;
  int32_t pre_softmax;
} mimo_router_backward_args;
MIMO_API int32_t mimo_router_backward(mimo_stream* stream, const mimo_router_backward_args* args);

/* bias[e] += rate * sign(mean(counts) - counts[e]); counts are then zero. */
typedef struct mimo_router_bias_update_args {
  float* bias;     /* [E] */
  int32_t* counts; /* [E] */
  int64_t experts;
  float rate;
} mimo_router_bias_update_args;
MIMO_API int32_t mimo_router_bias_update(mimo_stream* stream, const mimo_router_bias_update_args* args);
