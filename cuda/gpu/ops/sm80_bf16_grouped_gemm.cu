// Grouped GEMM through mma.sync: c_g[m_g, n] = a_g b_g(ᵀ) (forward, input gradient) and dw_g (+)= dy_gᵀ x_g (weight
// gradient). A block of 8 warps computes an output tile of 128 x 128 in k-steps of 64 with a three-stage cp.async
// pipeline.
#include "grouped_gemm.h"
#include "mma.cuh"

namespace mimo::cuda {
namespace {

constexpr int tile = 128, depth = tile_width, threads = 256, stages = 3;
constexpr int operand_bytes = tile * depth * 2, stage_bytes = 2 * operand_bytes;
constexpr int half_tile_bytes = operand_bytes / 2;  // a k-rows operand takes two tiles of 64 columns
constexpr int warp_rows = 64, warp_columns = 32;

/// An operand: `count` rows (left) or columns (right) from `data` on. `stride` elements separate consecutive rows or
/// columns (k-major) or consecutive k (k-rows).
struct Operand {
  const bf16* data;
  int64_t stride;
  int64_t count;
};

/// Starts the copy of k .. k + 63 to shared memory; elements beyond count and k_count are zero-filled.
template <bool k_rows>
__device__ __forceinline__ void fetch(const Operand& x, int64_t k, int64_t k_count, char* to) {
#pragma unroll
  for (int i = 0; i < tile * depth / 8 / threads; ++i) {
    const int index = i * threads + threadIdx.x;
    if constexpr (k_rows) {
      const int row = index / 16, chunk = index % 16;
      const bool live = k + row < k_count && chunk * 8 < x.count;
      const bf16* from = x.data + (live ? (k + row) * x.stride + chunk * 8 : 0);
      copy_async(to + chunk / 8 * half_tile_bytes + tile_offset(row, chunk % 8), from, live);
    } else {
      const int row = index / 8, chunk = index % 8;
      const bool live = row < x.count && k + chunk * 8 < k_count;
      const bf16* from = x.data + (live ? row * x.stride + k + chunk * 8 : 0);
      copy_async(to + tile_offset(row, chunk), from, live);
    }
  }
}

using Sums = float[warp_rows / 16][warp_columns / 8][4];

template <bool left_rows, bool right_rows>
__device__ __forceinline__ void multiply_stage(const char* left, const char* right, int row, int column, Sums& sum) {
#pragma unroll
  for (int k = 0; k < depth; k += 16) {
    uint32_t a[warp_rows / 16][4], b[warp_columns / 16][4];
#pragma unroll
    for (int i = 0; i < warp_rows / 16; ++i) {
      if constexpr (left_rows) {
        left_k_rows(a[i], left + row / 64 * half_tile_bytes, i * 16, k);
      } else {
        left_k_major(a[i], left, row + i * 16, k);
      }
    }
#pragma unroll
    for (int j = 0; j < warp_columns / 16; ++j) {
      if constexpr (right_rows) {
        right_k_rows(b[j], right + column / 64 * half_tile_bytes, column % 64 + j * 16, k);
      } else {
        right_k_major(b[j], right, column + j * 16, k);
      }
    }
#pragma unroll
    for (int i = 0; i < warp_rows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < warp_columns / 8; ++j) mma(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

/// sum = left right over k_count: this warp's part of the 128 x 128 tile.
template <bool left_rows, bool right_rows>
__device__ __forceinline__ void multiply(const Operand& left, const Operand& right, int64_t k_count, char* shared,
                                         Sums& sum) {
  const int warp = threadIdx.x / 32, row = warp / 4 * warp_rows, column = warp % 4 * warp_columns;
  const int64_t steps = ceil_div(k_count, depth);
  const auto start = [&](int64_t step) {
    if (step < steps) {
      char* to = shared + step % stages * stage_bytes;
      fetch<left_rows>(left, step * depth, k_count, to);
      fetch<right_rows>(right, step * depth, k_count, to + operand_bytes);
    }
    copy_commit();  // empty groups keep the number of groups in flight constant
  };
  for (int64_t step = 0; step < stages - 1; ++step) start(step);
  for (int64_t step = 0; step < steps; ++step) {
    copy_wait<stages - 2>();
    __syncthreads();
    start(step + stages - 1);
    const char* stage = shared + step % stages * stage_bytes;
    multiply_stage<left_rows, right_rows>(stage, stage + operand_bytes, row, column, sum);
  }
}

/// Calls body(row, column, x, y) for each pair of adjacent columns inside rows x columns.
template <class Body>
__device__ __forceinline__ void for_each_pair(const Sums& sum, int64_t rows, int64_t columns, Body&& body) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp / 4 * warp_rows + lane / 4, first_column = warp % 4 * warp_columns + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < warp_rows / 16; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + i * 16 + half * 8;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < warp_columns / 8; ++j) {
        const int column = first_column + j * 8;
        if (column < columns) body(row, column, sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
      }
    }
  }
}

template <class C, bool right_rows>
__global__ void __launch_bounds__(threads) forward_kernel(mimo_grouped_gemm_args args) {
  extern __shared__ __align__(128) char shared_memory[];
  const Piece piece = piece_at(args.offsets, args.groups, tile, blockIdx.y);
  if (piece.count == 0) return;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * tile, columns = smaller(tile, args.n - first_column);
  const bf16* b = static_cast<const bf16*>(args.b) + piece.sequence * args.n * args.k;
  const Operand left{static_cast<const bf16*>(args.a) + piece.begin * args.k, args.k, piece.count};
  const Operand right{b + first_column * (right_rows ? 1 : args.k), right_rows ? args.n : args.k, columns};
  Sums sum = {};
  multiply<false, right_rows>(left, right, args.k, shared_memory, sum);
  C* c = static_cast<C*>(args.c) + piece.begin * args.n + first_column;
  for_each_pair(sum, piece.count, columns, [&](int64_t row, int64_t column, float x, float y) {
    if constexpr (std::is_same_v<C, float>) {
      *reinterpret_cast<float2*>(c + row * args.n + column) = make_float2(x, y);
    } else {
      *reinterpret_cast<uint32_t*>(c + row * args.n + column) = pack_bf16(x, y);
    }
  });
}

__global__ void __launch_bounds__(threads) weight_gradient_kernel(mimo_grouped_gemm_weight_gradient_args args) {
  extern __shared__ __align__(128) char shared_memory[];
  const int64_t group = blockIdx.z, begin = args.offsets[group], count = args.offsets[group + 1] - begin;
  if (count <= 0 && args.accumulate != 0) return;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * tile, rows = smaller(tile, args.n - first_row);
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * tile, columns = smaller(tile, args.k - first_column);
  const Operand left{static_cast<const bf16*>(args.dy) + begin * args.n + first_row, args.n, rows};
  const Operand right{static_cast<const bf16*>(args.x) + begin * args.k + first_column, args.k, columns};
  Sums sum = {};
  multiply<true, true>(left, right, count, shared_memory, sum);
  float* dw = args.dw + (group * args.n + first_row) * args.k + first_column;
  // All old values are loaded before the first is used, so that their latencies overlap.
  constexpr int pairs = warp_columns / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own_row = warp / 4 * warp_rows + lane / 4, own_column = warp % 4 * warp_columns + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < warp_rows / 16; ++i) {
    float2 before[2][pairs] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row + i * 16 + half * 8;
#pragma unroll
      for (int j = 0; j < pairs; ++j) {
        const int column = own_column + j * 8;
        if (args.accumulate != 0 && row < rows && column < columns) {
          before[half][j] = *reinterpret_cast<const float2*>(dw + row * args.k + column);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row + i * 16 + half * 8;
#pragma unroll
      for (int j = 0; j < pairs; ++j) {
        const int column = own_column + j * 8;
        if (row < rows && column < columns) {
          *reinterpret_cast<float2*>(dw + row * args.k + column) =
              make_float2(before[half][j].x + sum[i][j][half * 2], before[half][j].y + sum[i][j][half * 2 + 1]);
        }
      }
    }
  }
}

}  // namespace

void sm80_bf16_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  const dim3 grid = grid_of(ceil_div(args.n, tile), piece_count(args.rows, args.groups, tile));
  with_dtype(args.c_dtype, [&](auto* t) {
    using C = std::remove_pointer_t<decltype(t)>;
    launch(stream, args.transpose_b ? forward_kernel<C, false> : forward_kernel<C, true>, grid, dim3(threads),
           stages * stage_bytes, args);
  });
}

void sm80_bf16_grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  launch(stream, weight_gradient_kernel, grid_of(ceil_div(args.k, tile), ceil_div(args.n, tile), args.groups),
         dim3(threads), stages * stage_bytes, args);
}

}  // namespace mimo::cuda
