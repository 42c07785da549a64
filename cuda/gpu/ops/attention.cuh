// Shared by the attention kernels without tensor cores: thread layout, tiles of a head in shared memory, dropout mask.
//
// 256 threads as 16 x 16: thread (row, column) computes rows row * n + i and columns column + 16 j of a tile, so 16
// neighbouring lanes share a row. Head dimensions are zero-padded to D.
#pragma once
#include "kernel.cuh"
#include "philox.h"

namespace mimo::cuda {

constexpr int attention_threads = 256;

/// Reduces (sum or maximum) over the 16 threads of a row.
__device__ __forceinline__ float row_sum(float value) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) value += __shfl_xor_sync(all_lanes, value, offset);
  return value;
}
__device__ __forceinline__ float row_max(float value) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(all_lanes, value, offset));
  return value;
}

/// tile[r][d] = factor * x[r * stride + d]; zeros beyond `rows` and head_dim.
template <int D, class T>
__device__ __forceinline__ void load_head(const T* x, int64_t stride, int64_t rows, int64_t head_dim, int tile_rows,
                                          float factor, float* tile) {
  for (int index = threadIdx.x; index < tile_rows * D; index += attention_threads) {
    const int r = index / D, d = index % D;
    tile[r * (D + 1) + d] = r < rows && d < head_dim ? factor * load(x + r * stride + d) : 0.0f;
  }
}

/// out[i][j] = Σ_d left[rows of the thread][d] right[columns of the thread][d].
template <int D, int N>
__device__ __forceinline__ void multiply_heads(const float* left, const float* right, float (&out)[N][N]) {
  const int row = threadIdx.x / 16 * N, column = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) out[i][j] = 0;
  }
#pragma unroll 8
  for (int d = 0; d < D; ++d) {
    float a[N], b[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      a[i] = left[(row + i) * (D + 1) + d];
      b[i] = right[(column + 16 * i) * (D + 1) + d];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) out[i][j] += a[i] * b[j];
    }
  }
}

/// out[i][j] += Σ_c weights[rows of the thread][c] x[c][column + 16 j] over a tile of 16 N rows.
template <int D, int N>
__device__ __forceinline__ void add_weighted(const float* weights, const float* x, float (&out)[N][D / 16]) {
  constexpr int tile = 16 * N;
  const int row = threadIdx.x / 16 * N, column = threadIdx.x % 16;
#pragma unroll 4
  for (int c = 0; c < tile; ++c) {
    float w[N];
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = weights[(row + i) * (tile + 1) + c];
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      const float value = x[c * (D + 1) + column + 16 * j];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i][j] += w[i] * value;
    }
  }
}

/// Dropout factor of an attention probability: 0 or 1 / (1 - dropout).
template <class Args>
__device__ __forceinline__ float dropout_factor(const Args& args, int64_t token, int64_t head, int64_t key) {
  if (args.dropout <= 0) return 1.0f;
  const uint64_t row = static_cast<uint64_t>((args.first_token + token) * args.full_heads + args.first_head + head);
  const PhiloxWords words =
      philox(static_cast<uint64_t>(args.dropout_seed), (row << 30) + static_cast<uint64_t>(key) / 4);
  uint32_t word = words.word[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) word = key % 4 == i ? words.word[i] : word;
  return philox_uniform(word) >= args.dropout ? 1.0f / (1.0f - args.dropout) : 0.0f;
}

/// Keys that a query sees at most; without a window more than any sequence has.
template <class Args>
__device__ __forceinline__ int64_t window_of(const Args& args) {
  return args.window > 0 ? args.window : int64_t{1} << 40;
}

/// First key of the tiles that a block of queries from `query` on sees.
template <class Args>
__device__ __forceinline__ int64_t first_tile(const Args& args, int64_t query, int tile) {
  const int64_t before = query - window_of(args) + 1;
  return before > 0 ? before / tile * tile : 0;
}

/// Validates the arguments.
template <class Args>
void require_attention(const Args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.query_heads % args.key_heads == 0, "attention");
  MIMO_REQUIRE(args.head_dim > 0 && args.value_dim > 0 && args.tokens >= 0 && args.sequences >= 0, "attention");
  MIMO_REQUIRE(args.mask == MIMO_ATTENTION_FULL || args.mask == MIMO_ATTENTION_CAUSAL, "attention");
  MIMO_REQUIRE(args.window == 0 || (args.window > 0 && args.mask == MIMO_ATTENTION_CAUSAL), "attention");
  MIMO_REQUIRE(args.dropout >= 0 && args.dropout < 1, "attention");
}

/// Calls body(T*, D, N): storage type, padded width of keys and values, rows of a thread (a tile has 16 N rows).
template <class Args, class Body>
void with_head_size(const Args& args, int small, Body&& body) {
  const int64_t wider = larger(args.head_dim, args.value_dim);
  with_dtype(args.dtype, [&](auto* t) {
    if (wider <= 64) {
      body(t, std::integral_constant<int, 64>{}, std::integral_constant<int, 4>{});
    } else if (wider <= 128) {
      if (small == 4) {
        body(t, std::integral_constant<int, 128>{}, std::integral_constant<int, 4>{});
      } else {
        body(t, std::integral_constant<int, 128>{}, std::integral_constant<int, 2>{});
      }
    } else if (wider <= 256) {
      body(t, std::integral_constant<int, 256>{}, std::integral_constant<int, 2>{});
    } else {
      fail(MIMO_ERROR_UNSUPPORTED, "Attention takes head dimensions of at most 256.");
    }
  });
}

}  // namespace mimo::cuda
