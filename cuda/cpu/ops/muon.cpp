// Muon's elementwise halves, around the products of its Newton-Schulz iteration, and its normalization (docs/spec/runtime.md
// §4.5).
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t elements_per_run = 8192;
constexpr int64_t elements_per_partial = 32768;

/// Type tag: the update writes no bf16 model weights.
struct NoModel {};

void advance(float* __restrict momentum, float* __restrict gradient, float clip, float beta, bool nesterov,
             int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float g = gradient[i] * clip;
    const float m = beta * momentum[i] + (1.0f - beta) * g;
    momentum[i] = m;
    gradient[i] = nesterov ? beta * m + (1.0f - beta) * g : m;
  }
}

template <class M>
void update(float* __restrict master, M* model, const float* __restrict direction, float rate, float decay,
            int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float p = master[i] - rate * (decay * master[i] + direction[i]);
    master[i] = p;
    if constexpr (!std::is_same_v<M, NoModel>) store(&model[i], p);
  }
}

double squares(const float* x, int64_t begin, int64_t end) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

template <class Y>
void divide(const float* __restrict x, Y* __restrict y, float norm, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) store(&y[i], x[i] / norm);
}

bool found(const float* found_inf) { return found_inf != nullptr && found_inf[0] != 0; }

}  // namespace

void muon_momentum(mimo_stream& stream, const mimo_muon_momentum_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "muon_momentum");
  if (found(args.found_inf)) return;
  const float clip = args.clip_factor ? args.clip_factor[0] : 1.0f;
  parallel_range(stream.device->threads, args.elements, elements_per_run, [&](int64_t begin, int64_t end) {
    advance(args.momentum, args.gradient, clip, args.beta, args.nesterov != 0, begin, end);
  });
}

void muon_normalize(mimo_stream& stream, const mimo_muon_normalize_args& args) {
  MIMO_REQUIRE(args.matrices >= 0 && args.elements > 0, "muon_normalize");
  const int64_t partials = (args.elements + elements_per_partial - 1) / elements_per_partial;
  Workspace workspace(&stream, partials * static_cast<int64_t>(sizeof(double)));
  double* partial = workspace.as<double>();
  for (int64_t matrix = 0; matrix < args.matrices; ++matrix) {
    const float* x = args.x + matrix * args.elements;
    parallel_range(stream.device->threads, args.elements, elements_per_partial, [&](int64_t begin, int64_t end) {
      partial[begin / elements_per_partial] = squares(x, begin, end);
    });
    double sum = 0;
    for (int64_t i = 0; i < partials; ++i) sum += partial[i];
    const float norm = std::max(static_cast<float>(std::sqrt(sum)), args.epsilon);
    with_dtype(args.dtype, [&](auto* type) {
      auto* y = static_cast<decltype(type)>(args.y) + matrix * args.elements;
      parallel_range(stream.device->threads, args.elements, elements_per_run,
                     [&](int64_t begin, int64_t end) { divide(x, y, norm, begin, end); });
    });
  }
}

void muon_update(mimo_stream& stream, const mimo_muon_update_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "muon_update");
  if (found(args.found_inf)) return;
  const float rate = args.learning_rate[0] * args.learning_rate_multiplier;
  const float decay = args.weight_decay[0] * args.weight_decay_multiplier;
  const auto run = [&](auto* model) {
    parallel_range(stream.device->threads, args.elements, elements_per_run, [&](int64_t begin, int64_t end) {
      update(args.master, model, args.update, rate, decay, begin, end);
    });
  };
  if (args.model == nullptr) return run(static_cast<NoModel*>(nullptr));
  with_dtype(args.model_dtype, [&](auto* type) { run(static_cast<decltype(type)>(args.model)); });
}

}  // namespace mimo::MIMO_ISA
