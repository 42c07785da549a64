// AdamW on fp32 master weights, and the scalars it reads: clipping factor, found_inf (docs/spec/runtime.md §4.3, §4.4).
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t elements_per_run = 8192;

struct Factors {
  float clip, beta1, beta2, c1, c2, epsilon, decay, rate;
};

/// Type tag: the update writes no bf16 model weights.
struct NoModel {};

template <class M, class First, class Second>
void update(const mimo_adamw_args& args, const Factors& f, M* model, First* __restrict exp_avg,
            Second* __restrict exp_avg_sq, int64_t begin, int64_t end) {
  float* __restrict master = args.master;
  const float* __restrict gradient = args.gradient;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float g = gradient[i] * f.clip;
    const float m = f.beta1 * load(exp_avg[i]) + (1.0f - f.beta1) * g;
    const float v = f.beta2 * load(exp_avg_sq[i]) + (1.0f - f.beta2) * g * g;
    const float u = (m / f.c1) / (std::sqrt(v / f.c2) + f.epsilon) + f.decay * master[i];
    const float p = master[i] - f.rate * u;
    store(&exp_avg[i], m);
    store(&exp_avg_sq[i], v);
    master[i] = p;
    if constexpr (!std::is_same_v<M, NoModel>) store(&model[i], p);
  }
}

bool found(const float* found_inf) { return found_inf != nullptr && found_inf[0] != 0; }

}  // namespace

void clip_factor(mimo_stream&, const mimo_clip_factor_args& args) {
  const double norm = std::sqrt(args.sum_of_squares[0]);
  const double factor = static_cast<double>(args.max_norm) / (norm + 1e-6);
  args.norm[0] = static_cast<float>(norm);
  // NaN compares false: no clipping.
  args.clip_factor[0] = args.max_norm != 0 && factor < 1 ? static_cast<float>(factor) : 1.0f;
  if (args.found_inf != nullptr && !(norm < static_cast<double>(INFINITY))) args.found_inf[0] = 1;
}

void adam_advance(mimo_stream&, const mimo_adam_advance_args& args) {
  if (found(args.found_inf)) return;
  args.step[0] += 1;
  const double step = static_cast<double>(args.step[0]);
  args.bias_correction1[0] = static_cast<float>(1.0 - std::pow(static_cast<double>(args.beta1), step));
  args.bias_correction2[0] = static_cast<float>(1.0 - std::pow(static_cast<double>(args.beta2), step));
}

void adamw(mimo_stream& stream, const mimo_adamw_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "adamw");
  if (found(args.found_inf)) return;
  const Factors factors{args.clip_factor ? args.clip_factor[0] : 1.0f,
                        args.beta1,
                        args.beta2,
                        args.bias_correction1[0],
                        args.bias_correction2[0],
                        args.epsilon,
                        args.weight_decay[0] * args.weight_decay_multiplier,
                        args.learning_rate[0] * args.learning_rate_multiplier};
  const auto run = [&](auto* model) {
    with_dtype(args.exp_avg_dtype, [&](auto* first) {
      with_dtype(args.exp_avg_sq_dtype, [&](auto* second) {
        auto* exp_avg = static_cast<decltype(first)>(args.exp_avg);
        auto* exp_avg_sq = static_cast<decltype(second)>(args.exp_avg_sq);
        parallel_range(stream.device->threads, args.elements, elements_per_run, [&](int64_t begin, int64_t end) {
          update(args, factors, model, exp_avg, exp_avg_sq, begin, end);
        });
      });
    });
  };
  if (args.model == nullptr) return run(static_cast<NoModel*>(nullptr));
  with_dtype(args.model_dtype, [&](auto* t) { run(static_cast<decltype(t)>(args.model)); });
}

}  // namespace mimo::MIMO_ISA
