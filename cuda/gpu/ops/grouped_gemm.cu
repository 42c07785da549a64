// Grouped GEMM of experts, each group of rows times its own matrix (docs/spec/moe-performance.md §1.1, §1.3): dispatch
// to the kernels in grouped_gemm.h, and the fallback for any storage types in fp32 without tensor cores.
#include "grouped_gemm.h"

#include "kernel.cuh"

namespace mimo::cuda {
namespace {

constexpr int tile = 64, depth = 16, threads = 256;

/// An operand of any storage type; element (i, k) is at i * stride + k * k_stride.
struct Operand {
  const void* data;
  int64_t stride, k_stride;
  int32_t dtype;
};

__device__ __forceinline__ float element(const Operand& x, int64_t at) {
  return x.dtype == MIMO_DTYPE_F32 ? load(static_cast<const float*>(x.data) + at)
                                   : load(static_cast<const bf16*>(x.data) + at);
}

/// Loads [tile, depth] of an operand to shared memory, zeros beyond `count` and `k_count`; loads are coalesced.
__device__ __forceinline__ void load_tile(const Operand& x, int64_t origin, int64_t count, int64_t k_count,
                                          float (&to)[depth][tile + 1]) {
  for (int index = threadIdx.x; index < tile * depth; index += threads) {
    const int i = x.k_stride == 1 ? index / depth : index % tile;
    const int k = x.k_stride == 1 ? index % depth : index / tile;
    to[k][i] = i < count && k < k_count ? element(x, origin + i * x.stride + k * x.k_stride) : 0.0f;
  }
}

/// sum[4][4] of this thread: rows 4 (t / 16) + i, columns t % 16 + 16 j of a b over k_count.
__device__ __forceinline__ void multiply(const Operand& a, int64_t a_origin, int64_t rows, const Operand& b,
                                         int64_t b_origin, int64_t columns, int64_t k_count, float (&sum)[4][4]) {
  __shared__ float a_tile[depth][tile + 1], b_tile[depth][tile + 1];
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
  for (int64_t k = 0; k < k_count; k += depth) {
    load_tile(a, a_origin + k * a.k_stride, rows, k_count - k, a_tile);
    load_tile(b, b_origin + k * b.k_stride, columns, k_count - k, b_tile);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < depth; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += a_tile[d][row + i] * b_tile[d][column + 16 * j];
      }
    }
    __syncthreads();
  }
}

template <class C>
__global__ void forward_kernel(mimo_grouped_gemm_args args) {
  const Piece piece = piece_at(args.offsets, args.groups, tile, blockIdx.y);
  if (piece.count == 0) return;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * tile, columns = smaller(tile, args.n - first_column);
  const Operand a{args.a, args.k, 1, args.a_dtype};
  const Operand b{args.b, args.transpose_b ? args.k : 1, args.transpose_b ? 1 : args.n, args.b_dtype};
  float sum[4][4] = {};
  multiply(a, piece.begin * args.k, piece.count, b, piece.sequence * args.n * args.k + first_column * b.stride, columns,
           args.k, sum);
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
  C* c = static_cast<C*>(args.c) + piece.begin * args.n + first_column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (row + i < piece.count && column + 16 * j < columns) store(c + (row + i) * args.n + column + 16 * j, sum[i][j]);
    }
  }
}

__global__ void weight_gradient_kernel(mimo_grouped_gemm_weight_gradient_args args) {
  const int64_t group = blockIdx.z, begin = args.offsets[group], count = args.offsets[group + 1] - begin;
  if (count <= 0 && args.accumulate != 0) return;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * tile, rows = smaller(tile, args.n - first_row);
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * tile, columns = smaller(tile, args.k - first_column);
  const Operand dy{args.dy, 1, args.n, args.dy_dtype}, x{args.x, 1, args.k, args.x_dtype};
  float sum[4][4] = {};
  multiply(dy, begin * args.n + first_row, rows, x, begin * args.k + first_column, columns, count, sum);
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
  float* dw = args.dw + (group * args.n + first_row) * args.k + first_column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (row + i >= rows || column + 16 * j >= columns) continue;
      float* const to = dw + (row + i) * args.k + column + 16 * j;
      *to = args.accumulate != 0 ? *to + sum[i][j] : sum[i][j];
    }
  }
}

bool is_float(int32_t dtype) { return dtype == MIMO_DTYPE_F32 || dtype == MIMO_DTYPE_BF16; }

/// Whether tensor-core kernels can read rows of `width` bf16 in 16-byte vectors.
bool readable(const void* pointer, int64_t width) { return packs_fit<bf16>(pointer, width, width, 8); }

}  // namespace

void grouped_gemm_plain(mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  const dim3 grid = grid_of(ceil_div(args.n, tile), piece_count(args.rows, args.groups, tile));
  with_dtype(args.c_dtype, [&](auto* t) {
    launch(stream, forward_kernel<std::remove_pointer_t<decltype(t)>>, grid, dim3(threads), 0, args);
  });
}

void grouped_gemm_weight_gradient_plain(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  launch(stream, weight_gradient_kernel, grid_of(ceil_div(args.k, tile), ceil_div(args.n, tile), args.groups),
         dim3(threads), 0, args);
}

void grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  if (args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE) {
    MIMO_REQUIRE(args.b_dtype == MIMO_DTYPE_U8 && (args.offsets != nullptr || args.groups == 1), "grouped_gemm");
    if (!sm90_e4m3_grouped_gemm_fits(stream, args)) {
      fail(MIMO_ERROR_UNSUPPORTED, "Products in e4m3 need Hopper, rows in bf16, and widths that are multiples of 16.");
    }
    if (args.rows > 0) sm90_e4m3_grouped_gemm(stream, args);
    return;
  }
  MIMO_REQUIRE(args.recipe == MIMO_MLP_RECIPE_PLAIN, "grouped_gemm");
  MIMO_REQUIRE(is_float(args.a_dtype) && is_float(args.b_dtype) && is_float(args.c_dtype), "grouped_gemm");
  MIMO_REQUIRE(args.groups >= 1 && args.n >= 0 && args.k >= 0, "grouped_gemm");
  MIMO_REQUIRE(piece_count(args.rows, args.groups, tile) <= 65535, "grouped_gemm");
  const bool tensor_cores = args.a_dtype == MIMO_DTYPE_BF16 && args.b_dtype == MIMO_DTYPE_BF16 && args.k > 0 &&
                            readable(args.a, args.k) && readable(args.b, args.k) && args.n % 8 == 0 &&
                            reinterpret_cast<uintptr_t>(args.c) % 8 == 0;
  if (tensor_cores && reinterpret_cast<uintptr_t>(args.c) % 16 == 0 &&
      sm90_grouped_gemm_fits(stream, args.rows, args.groups, args.n, args.k)) {
    sm90_bf16_grouped_gemm(stream, args);
  } else {
    tensor_cores ? sm80_bf16_grouped_gemm(stream, args) : grouped_gemm_plain(stream, args);
  }
}

void grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  const bool rounds = args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE;
  const auto stored = [&](int32_t dtype, const float* factors) {
    return factors == nullptr ? is_float(dtype) : dtype == MIMO_DTYPE_U8 && rounds;
  };
  MIMO_REQUIRE(stored(args.dy_dtype, args.dy_factors) && stored(args.x_dtype, args.x_factors), "grouped_gemm_weight_gradient");
  MIMO_REQUIRE(args.groups >= 1 && args.n >= 0 && args.k >= 0, "grouped_gemm_weight_gradient");
  MIMO_REQUIRE(args.groups <= 65535 && args.n <= 65535 * tile, "grouped_gemm_weight_gradient");
  MIMO_REQUIRE(args.recipe == MIMO_MLP_RECIPE_PLAIN || args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE, "grouped_gemm_weight_gradient");
  // Without rows there is nothing to quantise.
  if (rounds && args.rows > 0 && args.n > 0 && args.k > 0) {
    if (!sm90_e4m3_grouped_gemm_weight_gradient_fits(stream, args)) {
      fail(MIMO_ERROR_UNSUPPORTED,
           "Weight gradients of experts in e4m3 need a Hopper GPU (sm_90), storage in bf16, widths in steps of 16, and at most 8 "
           "million rows.");
    }
    return sm90_e4m3_grouped_gemm_weight_gradient(stream, args);
  }
  const bool tensor_cores = args.rows > 0 && args.dy_dtype == MIMO_DTYPE_BF16 && args.x_dtype == MIMO_DTYPE_BF16 &&
                            readable(args.dy, args.n) && readable(args.x, args.k) &&
                            reinterpret_cast<uintptr_t>(args.dw) % 8 == 0;
  if (tensor_cores && reinterpret_cast<uintptr_t>(args.dw) % 16 == 0 &&
      sm90_grouped_gemm_fits(stream, args.rows, args.groups, args.n, args.k)) {
    sm90_bf16_grouped_gemm_weight_gradient(stream, args);
  } else {
    tensor_cores ? sm80_bf16_grouped_gemm_weight_gradient(stream, args)
                 : grouped_gemm_weight_gradient_plain(stream, args);
  }
}

}  // namespace mimo::cuda
