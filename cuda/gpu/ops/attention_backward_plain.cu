// Attention backward without tensor cores (Dao et al., FlashAttention-2, algorithm 2): probabilities are recomputed
// from the log-sum-exp. A kernel over blocks of queries computes dq, a kernel over blocks of keys dk and dv, so no sum
// spans blocks.
//
//   p = exp(scale q kᵀ - lse)   dv = pᵀ do   dp = do vᵀ   ds = p (dp - Σ_i do_i o_i)   dq = scale ds k   dk = scale dsᵀ q
#include "attention.cuh"
#include "attention_plain.h"

namespace mimo::cuda {
namespace {

/// dot[t, head] = Σ_i do_i o_i; a warp for each (t, head).
template <class T>
__global__ void dot_kernel(mimo_attention_backward_args args, float* dot) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (index >= args.tokens * args.query_heads) return;
  const T* d_o = static_cast<const T*>(args.d_o) + index / args.query_heads * args.d_o_stride +
                 index % args.query_heads * args.value_dim;
  const T* o = static_cast<const T*>(args.o) + index * args.value_dim;
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < args.value_dim; i += 32) sum += load(d_o + i) * load(o + i);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) dot[index] = sum;
}

/// p and ds of one query, head and key; both 0 for a masked key.
struct Gradient {
  float p, ds;
};
__device__ __forceinline__ Gradient gradient_of(const mimo_attention_backward_args& args, bool seen, float score,
                                                float dp, float lse, float dot, int64_t token, int64_t head,
                                                int64_t key) {
  if (!seen) return {0.0f, 0.0f};
  const float p = exp2f(score - lse), keep = dropout_factor(args, token, head, key);
  return {p * keep, p * (dp * keep - dot)};
}

template <class T, int D, int N>
__global__ void __launch_bounds__(attention_threads) query_kernel(mimo_attention_backward_args args, const float* dots) {
  extern __shared__ float shared_tiles[];
  constexpr int tile = 16 * N;
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, tile, blockIdx.x);
  if (piece.count == 0) return;
  float* const q = shared_tiles;
  float* const d_o = q + tile * (D + 1);
  float* const k = d_o + tile * (D + 1);
  float* const v = k + tile * (D + 1);
  float* const ds = v + tile * (D + 1);
  const int64_t head = blockIdx.y, d = args.head_dim, e = args.value_dim;
  const int64_t heads_per_group = args.query_heads / args.key_heads;
  const int64_t group_offset = head / heads_per_group * args.group_stride, length = piece.last - piece.first;
  const int64_t head_offset = group_offset + head % heads_per_group * d, query = piece.begin - piece.first;
  const bool causal = args.mask == MIMO_ATTENTION_CAUSAL;
  const int row = threadIdx.x / 16 * N, column = threadIdx.x % 16;
  load_head<D>(static_cast<const T*>(args.q) + piece.begin * args.token_stride + head_offset, args.token_stride,
               piece.count, d, tile, args.softmax_scale * log2_e, q);
  load_head<D>(static_cast<const T*>(args.d_o) + piece.begin * args.d_o_stride + head * e, args.d_o_stride, piece.count,
               e, tile, 1.0f, d_o);
  float lse[N], dot[N], dq[N][D / 16] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int64_t at = (piece.begin + smaller(row + i, piece.count - 1)) * args.query_heads + head;
    lse[i] = args.lse[at] * log2_e;
    dot[i] = dots[at];
  }
  const int64_t key_end = causal ? query + piece.count : length;
  for (int64_t first = first_tile(args, query, tile); first < key_end; first += tile) {
    __syncthreads();
    const int64_t at = (piece.first + first) * args.token_stride + group_offset;
    load_head<D>(static_cast<const T*>(args.k) + at, args.token_stride, length - first, d, tile, 1.0f, k);
    load_head<D>(static_cast<const T*>(args.v) + at, args.token_stride, length - first, e, tile, 1.0f, v);
    __syncthreads();
    float s[N][N], dp[N][N];
    multiply_heads<D>(q, k, s);
    multiply_heads<D>(d_o, v, dp);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int64_t seen = causal ? smaller(query + row + i + 1, length) : length;
      const int64_t hidden = query + row + i - window_of(args);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int64_t key = first + column + 16 * j;
        ds[(row + i) * (tile + 1) + column + 16 * j] =
            gradient_of(args, key < seen && key > hidden, s[i][j], dp[i][j], lse[i], dot[i], piece.begin + row + i, head,
                        key)
                .ds;
      }
    }
    __syncwarp();
    add_weighted<D, N>(ds, k, dq);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (row + i >= piece.count) continue;
    T* to = static_cast<T*>(args.dq) + (piece.begin + row + i) * args.d_token_stride + head_offset;
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      if (column + 16 * j < d) store(to + column + 16 * j, args.softmax_scale * dq[i][j]);
    }
  }
}

/// Rows of a thread's tiles are keys, columns are queries.
template <class T, int D, int N>
__global__ void __launch_bounds__(attention_threads) key_kernel(mimo_attention_backward_args args, const float* dots) {
  extern __shared__ float shared_tiles[];
  constexpr int tile = 16 * N;
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, tile, blockIdx.x);
  if (piece.count == 0) return;
  float* const k = shared_tiles;
  float* const v = k + tile * (D + 1);
  float* const q = v + tile * (D + 1);
  float* const d_o = q + tile * (D + 1);
  float* const p = d_o + tile * (D + 1);
  float* const ds = p + tile * (tile + 1);
  const int64_t group = blockIdx.y, d = args.head_dim, e = args.value_dim;
  const int64_t heads_per_group = args.query_heads / args.key_heads;
  const int64_t group_offset = group * args.group_stride, length = piece.last - piece.first;
  const int64_t key = piece.begin - piece.first;
  const bool causal = args.mask == MIMO_ATTENTION_CAUSAL;
  const int row = threadIdx.x / 16 * N, column = threadIdx.x % 16;
  const int64_t at = piece.begin * args.token_stride + group_offset;
  load_head<D>(static_cast<const T*>(args.k) + at, args.token_stride, piece.count, d, tile, 1.0f, k);
  load_head<D>(static_cast<const T*>(args.v) + at, args.token_stride, piece.count, e, tile, 1.0f, v);
  const int64_t window = window_of(args), query_end = smaller(length, key + piece.count + window - 1);
  float dk[N][D / 16] = {}, dv[N][D / 16] = {};
  for (int64_t head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
    const int64_t head_offset = group_offset + head % heads_per_group * d;
    for (int64_t first = causal ? key / tile * tile : 0; first < query_end; first += tile) {
      const int64_t token = piece.first + first, rows = length - first;
      __syncthreads();
      load_head<D>(static_cast<const T*>(args.q) + token * args.token_stride + head_offset, args.token_stride, rows, d,
                   tile, args.softmax_scale * log2_e, q);
      load_head<D>(static_cast<const T*>(args.d_o) + token * args.d_o_stride + head * e, args.d_o_stride, rows, e, tile,
                   1.0f, d_o);
      __syncthreads();
      float s[N][N], dp[N][N];
      multiply_heads<D>(k, q, s);
      multiply_heads<D>(v, d_o, dp);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int64_t query = first + column + 16 * j;
        const bool live = query < length;
        const int64_t index = (piece.first + smaller(query, length - 1)) * args.query_heads + head;
        const float lse = args.lse[index] * log2_e, dot = dots[index];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const bool seen = live && row + i < piece.count && (!causal || key + row + i <= query) &&
                            query < key + row + i + window;
          const Gradient g = gradient_of(args, seen, s[i][j], dp[i][j], lse, dot, piece.first + query, head,
                                         key + row + i);
          p[(row + i) * (tile + 1) + column + 16 * j] = g.p;
          ds[(row + i) * (tile + 1) + column + 16 * j] = g.ds;
        }
      }
      __syncwarp();
      add_weighted<D, N>(p, d_o, dv);
      add_weighted<D, N>(ds, q, dk);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (row + i >= piece.count) continue;
    const int64_t to = (piece.begin + row + i) * args.d_token_stride + group_offset;
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      // q was scaled by scale * log2 e.
      if (column + 16 * j < d) store(static_cast<T*>(args.dk) + to + column + 16 * j, ln_2 * dk[i][j]);
      if (column + 16 * j < e) store(static_cast<T*>(args.dv) + to + column + 16 * j, dv[i][j]);
    }
  }
}

}  // namespace

void attention_backward_plain(mimo_stream& stream, const mimo_attention_backward_args& args) {
  const int64_t pairs = args.tokens * args.query_heads;
  Workspace dot_space(&stream, pairs * static_cast<int64_t>(sizeof(float)));
  float* const dots = dot_space.as<float>();
  with_head_size(args, 2, [&](auto* t, auto size, auto rows) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int D = size, N = rows, tile = 16 * N;
    const int64_t pieces = piece_count(args.tokens, args.sequences, tile);
    const int64_t tiles = 4 * tile * (D + 1) * 4, square = tile * (tile + 1) * 4;
    launch(stream, dot_kernel<T>, grid_of(ceil_div(pairs, 8)), dim3(256), 0, args, dots);
    launch(stream, query_kernel<T, D, N>, grid_of(pieces, args.query_heads), dim3(attention_threads), tiles + square,
           args, dots);
    launch(stream, key_kernel<T, D, N>, grid_of(pieces, args.key_heads), dim3(attention_threads), tiles + 2 * square,
           args, dots);
  });
}

}  // namespace mimo::cuda
