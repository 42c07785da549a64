// Chunk-scan (SSD) forward without tensor cores (docs/spec/language-model.md §2.3).
#include "ssd.h"
#include "ssd_plain.cuh"

namespace mimo::cuda {
namespace {

struct States {
  SsdDecays decays;
  bool of_end;
  const int32_t* cu_seqlens;
  int64_t sequences, tokens, heads, head_dim, groups, state_dim, chunk;
};

template <class A, class B>
__global__ void states_kernel(const A* a, int64_t a_stride, const B* b, int64_t b_stride, States s, float* to) {
  extern __shared__ float shared_tiles[];
  const Piece piece = piece_at(s.cu_seqlens, s.sequences, s.chunk, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t head = blockIdx.y, group = head / (s.heads / s.groups);
  const int count = static_cast<int>(piece.count), p = static_cast<int>(s.head_dim), n = static_cast<int>(s.state_dim);
  SsdShared shared{shared_tiles};
  const SsdTile a_tile = shared.tile(count, p), b_tile = shared.tile(count, n);
  const float* sum = s.decays.sum + head * s.tokens + piece.begin;
  const float* step = s.decays.step + head * s.tokens + piece.begin;
  const float last = sum[count - 1];
  load_tile(a + piece.begin * a_stride + head * p, a_stride, count, p, a_tile,
            [&](int t) { return s.of_end ? expf(last - sum[t]) * step[t] : expf(sum[t]); });
  load_tile(b + piece.begin * b_stride + group * n, b_stride, count, n, b_tile);
  __syncthreads();
  float* out = to + (blockIdx.x * s.heads + head) * p * n;
  for_each_element(p, n, [&](int row, int column) {
    float total = 0;
    for (int t = 0; t < count; ++t) total += a_tile.at(t, row) * b_tile.at(t, column);
    out[row * n + column] = total;
  });
}

template <class T>
__global__ void output_kernel(mimo_ssd_forward_args args, SsdDecays decays, const float* states, int64_t chunk) {
  extern __shared__ float shared_tiles[];
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, chunk, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t head = blockIdx.y, group = head / (args.heads / args.groups);
  const int count = static_cast<int>(piece.count);
  const int p = static_cast<int>(args.head_dim), n = static_cast<int>(args.state_dim);
  SsdShared shared{shared_tiles};
  const SsdTile b = shared.tile(count, n), c = shared.tile(count, n), x = shared.tile(count, p);
  const SsdTile mixed = shared.tile(count, count), state = shared.tile(p, n);
  const float* sum = decays.sum + head * args.tokens + piece.begin;
  const float* step = decays.step + head * args.tokens + piece.begin;
  const int64_t row = piece.begin * args.xbc_stride;
  load_tile(static_cast<const T*>(args.b) + row + group * n, args.xbc_stride, count, n, b);
  load_tile(static_cast<const T*>(args.c) + row + group * n, args.xbc_stride, count, n, c);
  load_tile(static_cast<const T*>(args.x) + row + head * p, args.xbc_stride, count, p, x);
  load_tile(states + (blockIdx.x * args.heads + head) * p * n, n, p, n, state);
  __syncthreads();
  for_each_element(count, count, [&](int i, int j) {
    float g = 0;
    if (j <= i) {
      for (int k = 0; k < n; ++k) g += c.at(i, k) * b.at(j, k);
      g *= expf(sum[i] - sum[j]) * step[j];
    }
    mixed.at(i, j) = g;
  });
  __syncthreads();
  const float d = args.d[head];
  for_each_element(count, p, [&](int i, int k) {
    float through = 0, within = 0;
    for (int m = 0; m < n; ++m) through += c.at(i, m) * state.at(k, m);
    for (int j = 0; j <= i; ++j) within += mixed.at(i, j) * x.at(j, k);
    const float y = expf(sum[i]) * through + within + d * x.at(i, k);
    const int64_t token = piece.begin + i, at = (token * args.heads + head) * p + k;
    float gate = load(static_cast<const T*>(args.z) + token * args.z_stride + head * p + k);
    if (args.z_factors != nullptr) gate *= args.z_factors[head * p + k];
    if (args.y != nullptr) store(static_cast<T*>(args.y) + at, y);
    store(static_cast<T*>(args.o) + at, y * gate * sigmoid(gate));
  });
}

}  // namespace

void ssd_chunk_states_plain(mimo_stream& stream, const void* a, int64_t a_stride, int32_t a_dtype, const void* b,
                            int64_t b_stride, int32_t b_dtype, const SsdDecays& decays, bool of_end,
                            const int32_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t heads,
                            int64_t head_dim, int64_t groups, int64_t state_dim, int64_t chunk, float* to) {
  const States states{decays, of_end, cu_seqlens, sequences, tokens, heads, head_dim, groups, state_dim, chunk};
  with_dtype(a_dtype, [&](auto* ta) {
    with_dtype(b_dtype, [&](auto* tb) {
      using A = std::remove_pointer_t<decltype(ta)>;
      using B = std::remove_pointer_t<decltype(tb)>;
      launch(stream, states_kernel<A, B>, grid_of(piece_count(tokens, sequences, chunk), heads), dim3(ssd_threads),
             4 * (tile_floats(chunk, head_dim) + tile_floats(chunk, state_dim)), static_cast<const A*>(a), a_stride,
             static_cast<const B*>(b), b_stride, states, to);
    });
  });
}

void ssd_forward_plain(mimo_stream& stream, const mimo_ssd_forward_args& args) {
  const int64_t p = args.head_dim, n = args.state_dim;
  const int64_t per_token = 2 * (n + 1) + p + 1, fixed = tile_floats(p, n);
  const int64_t chunk = ssd_plain_chunk(*stream.device, args.chunk_size, per_token, 1, fixed);
  const int64_t pieces = piece_count(args.tokens, args.sequences, chunk);
  Workspace decay_space(&stream, 2 * args.heads * args.tokens * 4);
  Workspace state_space(&stream, pieces * args.heads * p * n * 4);
  float* const step = decay_space.as<float>();
  float* const sum = step + args.heads * args.tokens;
  float* const states = state_space.as<float>();
  const SsdDecays decays{step, sum};
  ssd_decays(stream, args.dt, args.dt_stride, args.dt_bias, args.a_log, args.dt_minimum, args.cu_seqlens,
             args.sequences, args.tokens, args.heads, chunk, args.dtype, step, sum);
  ssd_chunk_states_plain(stream, args.x, args.xbc_stride, args.dtype, args.b, args.xbc_stride, args.dtype, decays, true,
                         args.cu_seqlens, args.sequences, args.tokens, args.heads, p, args.groups, n, chunk, states);
  ssd_pass(stream, false, states, states, MIMO_DTYPE_F32, args.final_state, sum, args.cu_seqlens, args.sequences, args.tokens, args.heads,
           p * n, chunk);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    launch(stream, output_kernel<T>, grid_of(pieces, args.heads), dim3(ssd_threads),
           4 * (chunk * per_token + tile_floats(chunk, chunk) + fixed), args, decays, states, chunk);
  });
}

}  // namespace mimo::cuda
