// The gated delta rule, forward (docs/spec/families.md §2.5): the choice of kernels, and those without tensor cores.
#include "gated_delta.cuh"

namespace mimo::cuda {
namespace {

/// Columns of a state in a block: four blocks a head of 128 fill a GPU with few heads better than one.
constexpr int64_t block_columns = 32;

template <class T>
__global__ void forward_kernel(mimo_gated_delta_forward_args args, int64_t width, int chunk) {
  extern __shared__ float shared_tiles[];
  SsdShared shared{shared_tiles};
  const int dk = static_cast<int>(args.key_dim);
  const DeltaColumns own = delta_columns(args.value_dim, width);
  const DeltaTiles t(shared, chunk, dk, static_cast<int>(width));
  const int64_t sequence = blockIdx.z, first = args.cu_seqlens[sequence], last = args.cu_seqlens[sequence + 1];
  for_each_element(dk, own.count, [&](int r, int c) { t.state.at(r, c) = 0; });
  __syncthreads();
  for (int64_t begin = first; begin < last; begin += chunk) {
    const int count = static_cast<int>(smaller(chunk, last - begin));
    delta_write<T>(args, t, own, begin, count);
    T* const o = static_cast<T*>(args.o) + (begin * args.value_heads + own.head) * args.value_dim + own.first;
    for_each_element(count, own.count, [&](int i, int c) {
      float through = 0, within = 0;
      for (int r = 0; r < dk; ++r) through += t.q.at(i, r) * t.state.at(r, c);
      for (int j = 0; j <= i; ++j) within += t.qk.at(i, j) * t.gamma.at(i, j) * t.written.at(j, c);
      store(o + i * args.value_heads * args.value_dim + c, t.from_start[i] * through + within);
    });
    __syncthreads();
    delta_advance(t, dk, own.count, count);
    __syncthreads();
  }
  if (args.final_state == nullptr) return;
  float* const to = args.final_state + (sequence * args.value_heads + own.head) * dk * args.value_dim + own.first;
  for_each_element(dk, own.count, [&](int r, int c) { to[r * args.value_dim + c] = t.state.at(r, c); });
}

}  // namespace

void gated_delta_forward(mimo_stream& stream, const mimo_gated_delta_forward_args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.value_heads % args.key_heads == 0, "gated_delta_forward");
  MIMO_REQUIRE(args.key_dim > 0 && args.value_dim > 0, "gated_delta_forward");
  const int64_t qkv = args.qkv_stride;
  if (fits_sm80_bf16(stream, args, {{args.q, qkv}, {args.k, qkv}, {args.v, qkv}, {args.o, args.value_heads * args.value_dim}})) {
    return fits_sm90(stream, args) ? sm90_bf16_gated_delta_forward(stream, args) : sm80_bf16_gated_delta_forward(stream, args);
  }
  const int64_t width = smaller(args.value_dim, block_columns), fixed = tile_floats(args.key_dim, width);
  const int64_t per_token = delta_floats_of_token(args.key_dim, width);
  const int64_t chunk = ssd_plain_chunk(*stream.device, 32, per_token, delta_floats_of_pair, fixed);
  const int64_t floats = fixed + chunk * per_token + delta_floats_of_pair * tile_floats(chunk, chunk);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    launch(stream, forward_kernel<T>, grid_of(ceil_div(args.value_dim, width), args.value_heads, args.sequences),
           dim3(ssd_threads), 4 * floats, args, width, chunk);
  });
}

}  // namespace mimo::cuda
