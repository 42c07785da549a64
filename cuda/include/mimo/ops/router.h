/* Router of experts: scores, top-k choice, balancing losses and bias. All logits, scores and gradients are fp32. */
#pragma once

#include "../stream.h"

enum mimo_score_function { MIMO_SCORE_SIGMOID = 0, MIMO_SCORE_SOFTMAX = 1 };

/* Scores, top-k choice and routing weights (docs/spec/language-model.md §4.2), and the statistics of the balancing loss (§4.4:
 * of unbiased normalised scores, by sequence). Of equal values the lower expert index is chosen. Routing weights with softmax:
 * over the chosen logits, or with pre_softmax = 1 the chosen values of the softmax over all. Padding tokens are routed like
 * others but excluded from the statistics. The three sequence_ arrays are all given or all null. On GPUs E is at most 1024. */
typedef struct mimo_router_forward_args {
  const float* logits;         /* [T, E] */
  const float* expert_bias;    /* [E], or null; sigmoid only */
  /* [E] added to the logits, which selection then compares whatever the scores are (sinkhorn); or null. With it there are
   * neither expert_bias nor groups, and softmax has pre_softmax = 1. */
  const float* logit_offsets;
  const uint8_t* padding_mask; /* [T] 1 = padding, or null */
  const int32_t* cu_seqlens;   /* for the sequence_ arrays; null without them */
  float* scores;               /* [T, E]: sigmoid, or softmax over all experts */
  float* probabilities;        /* [T, K] routing weights */
  int32_t* expert_index;       /* [T, K] the chosen experts of each token, in ascending order */
  int32_t* tokens_per_expert;  /* [E], added to; or null */
  float* sequence_counts;      /* [S, E] number of tokens with e in their unbiased top-k; written; or null */
  float* sequence_score_sums;  /* [S, E] Σ_t of the normalised scores; written; or null */
  float* sequence_tokens;      /* [S] number of tokens that are not padding; written; or null */
  int64_t sequences;
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  int64_t expert_groups; /* 1 = no group limit */
  int64_t group_topk;    /* groups of experts that a token may choose from */
  /* A group's score is the sum of its group_score_topk best values among those that selection compares: biased sigmoid
   * scores, probabilities with pre_softmax = 1, else logits. topk / group_topk in Megatron, 2 in Hugging Face. */
  int64_t group_score_topk;
  float scaling_factor;   /* of the routing weights */
  int32_t score_function; /* MIMO_SCORE_* */
  int32_t pre_softmax;    /* softmax: 1 before top-k, 0 after */
} mimo_router_forward_args;
MIMO_API int32_t mimo_router_forward(mimo_stream* stream, const mimo_router_forward_args* args);

/* loss += coefficient E / (K sequences) Σ_q Σ_e counts[q,e] sums[q,e] / tokens_q², tokens_q = sequence_tokens[q] times
 * sequence_shards; a sequence without tokens adds nothing. dnormalised[q,e] += gradient_scale * ∂loss/∂(one token's
 * normalised score). With sequences = 1 (the whole microbatch as one) the same is added to every row of dnormalised. */
typedef struct mimo_router_balancing_loss_args {
  const float* sequence_counts;     /* [sequences, E] */
  const float* sequence_score_sums; /* [sequences, E] */
  const float* sequence_tokens;     /* [sequences] */
  float* dnormalised;               /* [dnormalised_rows, E], added to; or null */
  float* loss;                      /* [1], added to; or null */
  int64_t dnormalised_rows;         /* equals sequences, unless that is 1 */
  int64_t sequences;
  int64_t experts;
  int64_t topk;
  int64_t sequence_shards; /* ranks that a sequence is split over, if sequence_tokens counts this rank's part only; else 1 */
  float coefficient;
  float gradient_scale;
} mimo_router_balancing_loss_args;
MIMO_API int32_t mimo_router_balancing_loss(mimo_stream* stream, const mimo_router_balancing_loss_args* args);

/* z_loss += Σ_t logsumexp(logits_t)² over the tokens that are not padding (not yet divided or weighted). */
typedef struct mimo_router_z_loss_args {
  const float* logits;         /* [T, E] */
  const uint8_t* padding_mask; /* [T] 1 = padding, or null */
  float* z_loss;               /* [1], added to */
  int64_t tokens;
  int64_t experts;
} mimo_router_z_loss_args;
MIMO_API int32_t mimo_router_z_loss(mimo_stream* stream, const mimo_router_z_loss_args* args);

/* The gradient of the logits, from those of the routing weights, of the balancing loss and of the z-loss. */
typedef struct mimo_router_backward_args {
  const float* logits; /* [T, E] */
  const float* scores; /* of _forward, as are probabilities and expert_index */
  const float* probabilities;
  const int32_t* expert_index;
  const float* dprobabilities; /* [T, K] */
  const float* dnormalised;    /* [S, E] of router_balancing_loss, or null */
  const uint8_t* padding_mask; /* or null; padding tokens get no gradient of the balancing loss and the z-loss */
  const int32_t* cu_seqlens;   /* null where dnormalised is */
  float* dlogits;              /* [T, E] */
  int64_t sequences;
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  float scaling_factor; /* not 0 */
  float z_loss_scale;   /* factor of the gradient of Σ logsumexp²; 0 = no z-loss */
  int32_t score_function;
  int32_t pre_softmax;
} mimo_router_backward_args;
MIMO_API int32_t mimo_router_backward(mimo_stream* stream, const mimo_router_backward_args* args);

/* bias[e] += rate * sign(mean(counts) - counts[e]); then counts are set to zero. */
typedef struct mimo_router_bias_update_args {
  float* bias;     /* [E] */
  int32_t* counts; /* [E] */
  int64_t experts;
  float rate;
} mimo_router_bias_update_args;
MIMO_API int32_t mimo_router_bias_update(mimo_stream* stream, const mimo_router_bias_update_args* args);
