/* Gradient clipping, AdamW and Muon. Scalars that change with every step are device memory of one element. */
#pragma once

#include "../stream.h"

/* norm = sqrt(sum_of_squares); clip_factor = min(1, max_norm / (norm + 1e-6)), or 1 if max_norm is 0 or the norm is NaN;
 * found_inf = 1 if the norm is not finite, else unchanged. */
typedef struct mimo_clip_factor_args {
  const double* sum_of_squares;
  float* norm;
  float* clip_factor;
  float* found_inf; /* or null */
  float max_norm;
} mimo_clip_factor_args;
MIMO_API int32_t mimo_clip_factor(mimo_stream* stream, const mimo_clip_factor_args* args);

/* step += 1, bias_correction1 = 1 - beta1^step, bias_correction2 = 1 - beta2^step, with powers in fp64. No effect if
 * found_inf is not 0. */
typedef struct mimo_adam_advance_args {
  int32_t* step;
  float* bias_correction1;
  float* bias_correction2;
  const float* found_inf; /* or null */
  float beta1;
  float beta2;
} mimo_adam_advance_args;
MIMO_API int32_t mimo_adam_advance(mimo_stream* stream, const mimo_adam_advance_args* args);

/* AdamW over flat buffers of `elements` numbers: g = gradient * clip_factor; m = beta1 m + (1 - beta1) g,
 * v = beta2 v + (1 - beta2) g²; u = (m / bias_correction1) / (sqrt(v / bias_correction2) + epsilon) +
 * weight_decay * weight_decay_multiplier * p; p -= learning_rate * learning_rate_multiplier * u. No effect if found_inf is not
 * 0. Arithmetic is fp32. Moments in bf16 are rounded (to nearest even) only when stored: u uses the unrounded values. */
typedef struct mimo_adamw_args {
  float* master;         /* p: the fp32 parameters */
  void* model;           /* receives p in model_dtype; or null if the model reads master */
  const float* gradient; /* fp32 */
  void* exp_avg;         /* m, in exp_avg_dtype: f32 or bf16 */
  void* exp_avg_sq;      /* v, in exp_avg_sq_dtype: f32 or bf16 */
  const float* learning_rate;
  const float* weight_decay;
  const float* clip_factor; /* or null = 1 */
  const float* bias_correction1;
  const float* bias_correction2;
  const float* found_inf; /* or null */
  int64_t elements;
  float beta1;
  float beta2;
  float epsilon;
  float weight_decay_multiplier;
  float learning_rate_multiplier;
  int32_t model_dtype;
  int32_t exp_avg_dtype;
  int32_t exp_avg_sq_dtype;
} mimo_adamw_args;
MIMO_API int32_t mimo_adamw(mimo_stream* stream, const mimo_adamw_args* args);

/* Muon's momentum over flat buffers: g = gradient * clip_factor; m = beta m + (1 - beta) g; gradient receives the direction of the
 * update: m, or with `nesterov` beta m + (1 - beta) g. No effect if found_inf is not 0. */
typedef struct mimo_muon_momentum_args {
  float* momentum;          /* m */
  float* gradient;          /* fp32; overwritten with the direction */
  const float* clip_factor; /* or null = 1 */
  const float* found_inf;   /* or null */
  int64_t elements;
  float beta;
  int32_t nesterov; /* 0 or 1 */
} mimo_muon_momentum_args;
MIMO_API int32_t mimo_muon_momentum(mimo_stream* stream, const mimo_muon_momentum_args* args);

/* y_i = x_i / max(||x_i||, epsilon) for each of `matrices` matrices x_i of `elements` numbers, by their Frobenius norms. */
typedef struct mimo_muon_normalize_args {
  const float* x; /* [matrices, elements] */
  void* y;        /* [matrices, elements], in dtype: f32 or bf16 */
  int64_t matrices;
  int64_t elements;
  float epsilon;
  int32_t dtype;
} mimo_muon_normalize_args;
MIMO_API int32_t mimo_muon_normalize(mimo_stream* stream, const mimo_muon_normalize_args* args);

/* p -= learning_rate * learning_rate_multiplier * (weight_decay * weight_decay_multiplier * p + update), in fp32. No effect if
 * found_inf is not 0. */
typedef struct mimo_muon_update_args {
  float* master;       /* p: the fp32 parameters */
  void* model;         /* receives p in model_dtype; or null if the model reads master */
  const float* update; /* fp32 */
  const float* learning_rate;
  const float* weight_decay;
  const float* found_inf; /* or null */
  int64_t elements;
  float weight_decay_multiplier;
  float learning_rate_multiplier;
  int32_t model_dtype;
} mimo_muon_update_args;
MIMO_API int32_t mimo_muon_update(mimo_stream* stream, const mimo_muon_update_args* args);
