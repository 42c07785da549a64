// Attention forward without tensor cores: o = softmax(scale q kᵀ) v within each sequence (docs/spec/language-model.md
// §3), over tiles of queries and keys with online softmax (Dao et al., FlashAttention-2).
#include "attention.cuh"
#include "attention_plain.h"

namespace mimo::cuda {
namespace {

template <class T, int D, int N>
__global__ void __launch_bounds__(attention_threads) forward_kernel(mimo_attention_forward_args args) {
  extern __shared__ float shared_tiles[];
  constexpr int tile = 16 * N;
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, tile, blockIdx.x);
  if (piece.count == 0) return;
  float* const q = shared_tiles;
  float* const k = q + tile * (D + 1);
  float* const v = k + tile * (D + 1);
  float* const p = v + tile * (D + 1);
  const int64_t head = blockIdx.y, d = args.head_dim, e = args.value_dim;
  const int64_t heads_per_group = args.query_heads / args.key_heads;
  const int64_t group = head / heads_per_group, length = piece.last - piece.first;
  const int64_t query = piece.begin - piece.first;
  const bool causal = args.mask == MIMO_ATTENTION_CAUSAL;
  const int row = threadIdx.x / 16 * N, column = threadIdx.x % 16;
  const int64_t group_offset = group * args.group_stride;
  load_head<D>(static_cast<const T*>(args.q) + piece.begin * args.token_stride + group_offset + head % heads_per_group * d,
               args.token_stride, piece.count, d, tile, args.softmax_scale * log2_e, q);

  float maximum[N], sum[N], o[N][D / 16] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) maximum[i] = -INFINITY, sum[i] = 0;
  const int64_t key_end = causal ? query + piece.count : length;
  for (int64_t first = first_tile(args, query, tile); first < key_end; first += tile) {
    __syncthreads();
    const int64_t at = (piece.first + first) * args.token_stride + group_offset;
    load_head<D>(static_cast<const T*>(args.k) + at, args.token_stride, length - first, d, tile, 1.0f, k);
    load_head<D>(static_cast<const T*>(args.v) + at, args.token_stride, length - first, e, tile, 1.0f, v);
    __syncthreads();
    float s[N][N];
    multiply_heads<D>(q, k, s);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int64_t seen = causal ? smaller(query + row + i + 1, length) : length;
      const int64_t hidden = query + row + i - window_of(args);
      float highest = maximum[i];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int64_t key = first + column + 16 * j;
        if (key >= seen || key <= hidden) s[i][j] = -INFINITY;
        highest = fmaxf(highest, s[i][j]);
      }
      highest = row_max(highest);
      const float shift = highest == -INFINITY ? 0.0f : highest;
      const float rescale = exp2f(maximum[i] - shift);
      float added = 0;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float probability = exp2f(s[i][j] - shift);
        added += probability;
        p[(row + i) * (tile + 1) + column + 16 * j] =
            probability * dropout_factor(args, piece.begin + row + i, head, first + column + 16 * j);
      }
      sum[i] = sum[i] * rescale + row_sum(added);
      maximum[i] = highest;
#pragma unroll
      for (int j = 0; j < D / 16; ++j) o[i][j] *= rescale;
    }
    __syncwarp();
    add_weighted<D, N>(p, v, o);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (row + i >= piece.count) continue;
    const int64_t at = (piece.begin + row + i) * args.query_heads + head;
    if (column == 0) args.lse[at] = maximum[i] * ln_2 + logf(sum[i]);
    const float scale = 1.0f / sum[i];
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      if (column + 16 * j < e) store(static_cast<T*>(args.o) + at * e + column + 16 * j, o[i][j] * scale);
    }
  }
}

}  // namespace

void attention_forward_plain(mimo_stream& stream, const mimo_attention_forward_args& args) {
  with_head_size(args, 4, [&](auto* t, auto size, auto rows) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int D = size, N = rows, tile = 16 * N;
    launch(stream, forward_kernel<T, D, N>,
           grid_of(piece_count(args.tokens, args.sequences, tile), args.query_heads), dim3(attention_threads),
           (3 * tile * (D + 1) + tile * (tile + 1)) * 4, args);
  });
}

}  // namespace mimo::cuda
