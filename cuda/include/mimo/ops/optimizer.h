/* AdamW. */
#pragma once

#include "../stream.h"

/* norm = sqrt(sum_of_squares); clip_factor = min(1, max_norm / (norm + 1e-6)) (1 when max_norm = 0 or the norm is NaN);
 * found_inf = 1 when the norm is not finite, else left alone. */
typedef struct mimo_clip_factor_args {
  const double* sum_of_squares;
  float* norm;
  float* clip_factor;
  float* found_inf; /* or null */
  float max_norm;
} mimo_clip_factor_args;
MIMO_API int32_t mimo_clip_factor(mimo_stream* stream, const mimo_clip_factor_args* args);

/* step[0] += 1, bias_correction1/2 = 1 - beta^step in fp64; unchanged when found_inf is not 0. */
typedef struct mimo_adam_advance_args {
  int32_t* step;
  float* bias_correction1;
  float* bias_correction2;
  const float* found_inf; /* or null */
  float beta1;
  float beta2;
} mimo_adam_advance_args;
MIMO_API int32_t mimo_adam_advance(mimo_stream* stream, const mimo_adam_advance_args* args);

/* AdamW over a flat buffer: g = gradient * clip_factor; m, v moments; u = (m/c1) / (sqrt(v/c2) + epsilon) +
 * weight_decay * weight_decay_multiplier * p; p -= learning_rate * learning_rate_multiplier * u. No value changes when
 * found_inf is not 0. All arithmetic is fp32; moments in bf16 are widened, and rounded to the nearest, ties to even, where
 * they are stored: u has those not rounded. */
typedef struct mimo_adamw_args {
  float* master;         /* fp32 parameters */
  void* model;           /* parameters as the model reads them, in model_dtype; or null when master is the model's */
  const float* gradient;
  void* exp_avg;    /* m, in exp_avg_dtype */
  void* exp_avg_sq; /* v, in exp_avg_sq_dtype */
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
