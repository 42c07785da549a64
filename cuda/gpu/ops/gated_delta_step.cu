// Decode step of the gated delta rule (docs/spec/families.md §2.5): a block owns a value head of a sequence, a thread some columns of
// its state. Memory-bound: states are read twice, the second time from the L2 cache, and written once.
#include "ssd_plain.cuh"

namespace mimo::cuda {
namespace {

template <class T>
__global__ void step_kernel(mimo_gated_delta_step_args args) {
  extern __shared__ float keys[];
  __shared__ float block_sums[64];
  const int64_t head = blockIdx.x, sequence = blockIdx.y, dk = args.key_dim, dv = args.value_dim;
  float *const q = keys, *const k = keys + dk;
  const int64_t from = sequence * args.qkv_stride + head / (args.value_heads / args.key_heads) * dk;
  float squares[2] = {0, 0};
  for (int64_t r = threadIdx.x; r < dk; r += blockDim.x) {
    q[r] = load(static_cast<const T*>(args.q) + from + r);
    k[r] = load(static_cast<const T*>(args.k) + from + r);
    squares[0] += q[r] * q[r];
    squares[1] += k[r] * k[r];
  }
  block_sum(squares, block_sums);
  const float q_factor = 1.0f / sqrtf((squares[0] + 1e-6f) * static_cast<float>(dk));
  const float k_factor = 1.0f / sqrtf(squares[1] + 1e-6f);
  __syncthreads();
  const int64_t ba = sequence * args.ba_stride + head;
  const float beta = sigmoid(load(static_cast<const T*>(args.b) + ba));
  const float decay =
      expf(-expf(args.a_log[head]) * softplus(load(static_cast<const T*>(args.a) + ba) + args.dt_bias[head]));
  float* const state = args.state + (args.slots[sequence] * args.value_heads + head) * dk * dv;
  for (int64_t c = threadIdx.x; c < dv; c += blockDim.x) {
    float read = 0, out = 0;
    for (int64_t r = 0; r < dk; ++r) read += k[r] * state[r * dv + c];
    const float v = load(static_cast<const T*>(args.v) + sequence * args.qkv_stride + head * dv + c);
    const float written = beta * (v - decay * k_factor * read) * k_factor;
    for (int64_t r = 0; r < dk; ++r) {
      const float next = decay * state[r * dv + c] + k[r] * written;
      state[r * dv + c] = next;
      out += q[r] * next;
    }
    store(static_cast<T*>(args.o) + (sequence * args.value_heads + head) * dv + c, q_factor * out);
  }
}

}  // namespace

void gated_delta_step(mimo_stream& stream, const mimo_gated_delta_step_args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.value_heads % args.key_heads == 0, "gated_delta_step");
  MIMO_REQUIRE(args.key_dim > 0 && args.value_dim > 0 && args.sequences >= 0, "gated_delta_step");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    launch(stream, step_kernel<T>, grid_of(args.value_heads, args.sequences), dim3(128), 2 * args.key_dim * 4, args);
  });
}

}  // namespace mimo::cuda
