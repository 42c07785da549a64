// Decode step of the gated delta rule (docs/spec/families.md §2.5). Memory-bound: each state is read twice and written once.
#include "gated_delta.h"

namespace mimo::MIMO_ISA {
namespace {

/// One sequence and value head. `space`: 2 D_k + 2 D_v floats.
template <class T>
void step_head(const mimo_gated_delta_step_args& args, int64_t sequence, int64_t head, float* space) {
  const int64_t dk = args.key_dim, dv = args.value_dim;
  const int64_t key = sequence * args.qkv_stride + head / (args.value_heads / args.key_heads) * dk;
  float *const q = space, *const k = q + dk, *const w = k + dk, *const out = w + dv;
  float factor;
  load_tile(static_cast<const T*>(args.q) + key, 0, 1, dk, q);
  load_tile(static_cast<const T*>(args.k) + key, 0, 1, dk, k);
  delta_normalise(q, 1, dk, &factor);
  delta_normalise(k, 1, dk, &factor);
  const T* const v = static_cast<const T*>(args.v) + sequence * args.qkv_stride + head * dv;
  const int64_t ba = sequence * args.ba_stride + head;
  const float argument = load(static_cast<const T*>(args.a)[ba]) + args.dt_bias[head];
  const float beta = sigmoid(load(static_cast<const T*>(args.b)[ba]));
  const float decay = exp_fast(-std::exp(args.a_log[head]) * softplus(argument));
  float* const state = args.state + (args.slots[sequence] * args.value_heads + head) * dk * dv;
  std::memset(w, 0, static_cast<size_t>(2 * dv) * sizeof(float));
  for (int64_t i = 0; i < dk; ++i) {
    const float* const row = state + i * dv;
    const float by = k[i];
    short_loop(dv, [=](int64_t c) { w[c] += by * row[c]; });
  }
  short_loop(dv, [=](int64_t c) { w[c] = beta * (load(v[c]) - decay * w[c]); });
  const float scale = 1.0f / std::sqrt(static_cast<float>(dk));
  for (int64_t i = 0; i < dk; ++i) {
    float* const row = state + i * dv;
    const float by = k[i], read = scale * q[i];
    short_loop(dv, [=](int64_t c) {
      row[c] = decay * row[c] + by * w[c];
      out[c] += read * row[c];
    });
  }
  T* const o = static_cast<T*>(args.o) + (sequence * args.value_heads + head) * dv;
  short_loop(dv, [=](int64_t c) { store(&o[c], out[c]); });
}

}  // namespace

void gated_delta_step(mimo_stream& stream, const mimo_gated_delta_step_args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.value_heads % args.key_heads == 0, "gated_delta_step");
  MIMO_REQUIRE(args.key_dim > 0 && args.value_dim > 0 && args.sequences >= 0, "gated_delta_step");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t floats = 2 * (args.key_dim + args.value_dim);
    ssd_run_tasks(stream, args.sequences * args.value_heads, floats, [&](int64_t index, float* space) {
      step_head<T>(args, index / args.value_heads, index % args.value_heads, space);
    });
  });
}

}  // namespace mimo::MIMO_ISA
