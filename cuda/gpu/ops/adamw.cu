// AdamW on fp32 master weights, and the device scalars it reads: clipping factor, found_inf (docs/spec/runtime.md §4.3,
// §4.4).
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

/// Type tag: the update writes no bf16 model weights.
struct NoModel {};

__global__ void clip_factor_kernel(const double* sum_of_squares, float* norm, float* clip_factor, float* found_inf,
                                   float max_norm) {
  const double root = sqrt(sum_of_squares[0]);
  const double factor = static_cast<double>(max_norm) / (root + 1e-6);
  norm[0] = static_cast<float>(root);
  // NaN compares false: no clipping.
  clip_factor[0] = max_norm != 0 && factor < 1 ? static_cast<float>(factor) : 1.0f;
  if (found_inf != nullptr && !isfinite(root)) found_inf[0] = 1;
}

__global__ void adam_advance_kernel(int32_t* step, float* bias_correction1, float* bias_correction2,
                                    const float* found_inf, float beta1, float beta2) {
  if (found_inf != nullptr && found_inf[0] != 0) return;
  step[0] += 1;
  const double steps = static_cast<double>(step[0]);
  bias_correction1[0] = static_cast<float>(1.0 - pow(static_cast<double>(beta1), steps));
  bias_correction2[0] = static_cast<float>(1.0 - pow(static_cast<double>(beta2), steps));
}

template <class M, class First, class Second, int Width>
__global__ void adamw_kernel(mimo_adamw_args args, int64_t packs) {
  if (args.found_inf != nullptr && args.found_inf[0] != 0) return;
  const float clip = args.clip_factor != nullptr ? args.clip_factor[0] : 1.0f;
  const float c1 = args.bias_correction1[0], c2 = args.bias_correction2[0];
  const float decay = args.weight_decay[0] * args.weight_decay_multiplier;
  const float rate = args.learning_rate[0] * args.learning_rate_multiplier;
  auto* exp_avg = static_cast<First*>(args.exp_avg);
  auto* exp_avg_sq = static_cast<Second*>(args.exp_avg_sq);
  for_each_pack(1, packs, [&](int64_t, int64_t pack) {
    const int64_t at = pack * Width;
    float p[Width], g[Width], m[Width], v[Width];
    read(args.master + at, p);
    read(args.gradient + at, g);
    read(exp_avg + at, m);
    read(exp_avg_sq + at, v);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const float gradient = g[i] * clip;
      m[i] = args.beta1 * m[i] + (1.0f - args.beta1) * gradient;
      v[i] = args.beta2 * v[i] + (1.0f - args.beta2) * gradient * gradient;
      const float u = (m[i] / c1) / (sqrtf(v[i] / c2) + args.epsilon) + decay * p[i];
      p[i] -= rate * u;
    }
    write(exp_avg + at, m);
    write(exp_avg_sq + at, v);
    write(args.master + at, p);
    if constexpr (!std::is_same_v<M, NoModel>) write(static_cast<M*>(args.model) + at, p);
  });
}

}  // namespace

void clip_factor(mimo_stream& stream, const mimo_clip_factor_args& args) {
  launch(stream, clip_factor_kernel, dim3(1), dim3(1), 0, args.sum_of_squares, args.norm, args.clip_factor,
         args.found_inf, args.max_norm);
}

void adam_advance(mimo_stream& stream, const mimo_adam_advance_args& args) {
  launch(stream, adam_advance_kernel, dim3(1), dim3(1), 0, args.step, args.bias_correction1, args.bias_correction2,
         args.found_inf, args.beta1, args.beta2);
}

void adamw(mimo_stream& stream, const mimo_adamw_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "adamw");
  const auto run = [&](auto* model) {
    with_dtype(args.exp_avg_dtype, [&](auto* first) {
      with_dtype(args.exp_avg_sq_dtype, [&](auto* second) {
        using M = std::remove_pointer_t<decltype(model)>;
        using First = std::remove_pointer_t<decltype(first)>;
        using Second = std::remove_pointer_t<decltype(second)>;
        const auto fits = [&](const void* pointer) { return packs_fit<float>(pointer, args.elements, 0, 4); };
        const bool moments_fit = packs_fit<First>(args.exp_avg, args.elements, 0, 4) &&
                                 packs_fit<Second>(args.exp_avg_sq, args.elements, 0, 4);
        const bool model_fits = sizeof(M) == 1 || reinterpret_cast<uintptr_t>(args.model) % (4 * sizeof(M)) == 0;
        with_width<4>(fits(args.master) && fits(args.gradient) && moments_fit && model_fits, [&](auto w) {
          const auto [grid, block] = cover(1, args.elements / w);
          launch(stream, adamw_kernel<M, First, Second, w>, grid, block, 0, args, args.elements / w);
        });
      });
    });
  };
  if (args.model == nullptr) return run(static_cast<NoModel*>(nullptr));
  with_dtype(args.model_dtype, run);
}

}  // namespace mimo::cuda
