// Decode step of the state space recurrence (docs/spec/language-model.md §2.2 steps 3 to 6): h = exp(a) h + Δ x ⊗ B, y
// = h C + D x, o = y silu(z). A block owns some rows of a head's state in one sequence, one warp a row. Memory-bound:
// states are read and written once, in whole lines.
#include "ssd.cuh"

namespace mimo::cuda {
namespace {

constexpr int warps = 8, rows_per_block = 32;

template <class T>
__global__ void step_kernel(mimo_ssd_step_args args) {
  const int64_t head = blockIdx.y, sequence = blockIdx.z, group = head / (args.heads / args.groups);
  const int64_t n = args.state_dim, p = args.head_dim, inner = args.heads * p;
  const int lane = threadIdx.x % 32;
  const float free = softplus(load(static_cast<const T*>(args.dt) + sequence * args.dt_stride + head) + args.dt_bias[head]);
  const float step = free < args.dt_minimum ? args.dt_minimum : free;  // NaN stays NaN
  const float decay = expf(-expf(args.a_log[head]) * step), d = args.d[head];
  const T* b = static_cast<const T*>(args.b) + sequence * args.xbc_stride + group * n;
  const T* c = static_cast<const T*>(args.c) + sequence * args.xbc_stride + group * n;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * rows_per_block, last = smaller(first + rows_per_block, p);
  for (int64_t row = first + threadIdx.x / 32; row < last; row += warps) {
    const float x = load(static_cast<const T*>(args.x) + sequence * args.xbc_stride + head * p + row), added = step * x;
    float* const state = args.state + ((args.slots[sequence] * args.heads + head) * p + row) * n;
    float y = 0;
    for (int64_t i = lane; i < n; i += 32) {
      const float h = decay * state[i] + added * load(b + i);
      state[i] = h;
      y += h * load(c + i);
    }
    y = warp_sum(y);
    if (lane != 0) continue;
    const float gate = load(static_cast<const T*>(args.z) + sequence * args.z_stride + head * p + row);
    store(static_cast<T*>(args.o) + sequence * inner + head * p + row, (y + d * x) * gate * sigmoid(gate));
  }
}

}  // namespace

void ssd_step(mimo_stream& stream, const mimo_ssd_step_args& args) {
  MIMO_REQUIRE(args.groups > 0 && args.heads % args.groups == 0, "ssd_step");
  MIMO_REQUIRE(args.head_dim > 0 && args.state_dim > 0 && args.sequences >= 0, "ssd_step");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    launch(stream, step_kernel<T>, grid_of(ceil_div(args.head_dim, rows_per_block), args.heads, args.sequences),
           dim3(32 * warps), 0, args);
  });
}

}  // namespace mimo::cuda
