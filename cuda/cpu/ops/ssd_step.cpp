// Decode step of the state space recurrence (docs/spec/language-model.md §2.2 steps 3 to 6): h = exp(a) h + Δ x ⊗ B, y
// = h C + D x, o = y silu(z). Memory-bound: each state is read and written once.
#include "ssd.h"

namespace mimo::MIMO_ISA {
namespace {

/// One sequence and head; b and c are its group's, in fp32.
template <class T>
void step_head(const mimo_ssd_step_args& args, int64_t sequence, int64_t head, const float* b, const float* c) {
  const int64_t p = args.head_dim, n = args.state_dim, at = sequence * args.heads * p + head * p;
  const T* x = static_cast<const T*>(args.x) + sequence * args.xbc_stride + head * p;
  const T* z = static_cast<const T*>(args.z) + sequence * args.z_stride + head * p;
  T* o = static_cast<T*>(args.o) + at;
  const float dt = load(static_cast<const T*>(args.dt)[sequence * args.dt_stride + head]);
  const float free = softplus(dt + args.dt_bias[head]);
  const float step = free < args.dt_minimum ? args.dt_minimum : free;  // NaN stays NaN
  const float decay = exp_fast(-std::exp(args.a_log[head]) * step), d = args.d[head];
  float* state = args.state + (args.slots[sequence] * args.heads + head) * p * n;
  for (int64_t i = 0; i < p; ++i, state += n) {
    const float own = load(x[i]), added = step * own;
    float y = 0;
#pragma omp simd reduction(+ : y)
    for (int64_t k = 0; k < n; ++k) {
      const float h = decay * state[k] + added * b[k];
      state[k] = h;
      y += h * c[k];
    }
    const float gate = load(z[i]);
    store(&o[i], (y + d * own) * gate * sigmoid(gate));
  }
}

}  // namespace

void ssd_step(mimo_stream& stream, const mimo_ssd_step_args& args) {
  MIMO_REQUIRE(args.groups > 0 && args.heads % args.groups == 0, "ssd_step");
  MIMO_REQUIRE(args.head_dim > 0 && args.state_dim > 0 && args.sequences >= 0, "ssd_step");
  const int64_t width = args.groups * args.state_dim, heads_per_group = args.heads / args.groups;
  Workspace space(&stream, 2 * args.sequences * width * static_cast<int64_t>(sizeof(float)));
  float* const b = space.as<float>();
  float* const c = b + args.sequences * width;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    load_tile(static_cast<const T*>(args.b), args.xbc_stride, args.sequences, width, b);
    load_tile(static_cast<const T*>(args.c), args.xbc_stride, args.sequences, width, c);
    parallel_range(stream.device->threads, args.sequences * args.heads, 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t sequence = i / args.heads, head = i % args.heads;
        const int64_t group = sequence * width + head / heads_per_group * args.state_dim;
        step_head<T>(args, sequence, head, b + group, c + group);
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
