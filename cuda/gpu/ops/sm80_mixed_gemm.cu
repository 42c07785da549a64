// GEMM of an fp32 and a bf16 matrix on tensor cores. The 24-bit significand of fp32 is split exactly into three bf16 of
// 8 bits each; each product of bf16 is exact in fp32, and sums are fp32.
#include "mixed_gemm.h"
#include "mma.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int parts = 3;
constexpr int band = 32;  // rows of a result that a warp computes: two m16 tiles

/// Splits two fp32 values, adjacent along k, into pairs of bf16: the leading 8 bits, the next 8 and the last 8.
__device__ __forceinline__ void cut(float first, float second, uint32_t (&to)[parts]) {
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    to[part] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
    first -= __uint_as_float(__float_as_uint(first) & 0xFFFF0000u);
    second -= __uint_as_float(__float_as_uint(second) & 0xFFFF0000u);
  }
}

/// sums[band, 64] += left[band, 16] right[16, 64]. `pair(row, k)` returns two values of the left operand adjacent along
/// k; `tile` holds the right operand as k-rows.
template <class Pair>
__device__ __forceinline__ void add_products(float (&sums)[2][8][4], const char* tile, int k, Pair&& pair) {
  const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  uint32_t left[2][parts][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 value = pair(16 * half + row + i % 2 * 8, column + i / 2 * 8);
      uint32_t cuts[parts];
      cut(value.x, value.y, cuts);
#pragma unroll
      for (int part = 0; part < parts; ++part) left[half][part][i] = cuts[part];
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t right[4];
    right_k_rows(right, tile, 16 * j, k);
#pragma unroll
    for (int part = parts - 1; part >= 0; --part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma(sums[half][2 * j], left[half][part], right[0], right[1]);
        mma(sums[half][2 * j + 1], left[half][part], right[2], right[3]);
      }
    }
  }
}

// ---- c[m, n] = a[m, k] b[k, n], k <= most_k
// --------------------------------------------------------------------------

constexpr int most_k = 256;
constexpr int block_rows = 128, block_columns = 128;  // warps: four bands x two tiles of columns
constexpr int staged_row = block_columns + 8;         // fp32 values of a staged row, padded against bank conflicts

__global__ void __launch_bounds__(threads, 2) few_k_kernel(mimo_gemm_args args) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int k = static_cast<int>(args.k);
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * block_rows;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * block_columns;
  const bf16* const b = static_cast<const bf16*>(args.b);
  // All columns of b: two k-rows tiles.
  for (int i = threadIdx.x; i < k * 16; i += threads) {
    const int row = i / 16, chunk = i % 16;
    const int64_t column = first_column + 8 * chunk;
    const bool live = column < args.n;
    copy_async(shared + chunk / 8 * k * tile_row_bytes + tile_offset(row, chunk % 8),
               b + row * args.b_stride + (live ? column : 0), live);
  }
  copy_commit();
  const int own_row = warp / 2 * band;
  const char* const tile = shared + warp % 2 * k * tile_row_bytes;
  const float* const a = static_cast<const float*>(args.a);
  float sums[2][8][4] = {};
  copy_wait<0>();
  __syncthreads();
#pragma unroll 1
  for (int at = 0; at < k; at += 16) {
    add_products(sums, tile, at, [&](int row, int column) {
      const int64_t from = first_row + own_row + row;
      return from < args.m ? *reinterpret_cast<const float2*>(a + from * args.a_stride + at + column) : float2{0, 0};
    });
  }
  __syncthreads();  // b has been read: its memory takes the accumulators, so that c is read and written in whole lines
  float* const staged = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int row = own_row + 16 * half + 8 * lower + lane / 4, column = warp % 2 * 64 + 8 * j + 2 * (lane % 4);
        *reinterpret_cast<float2*>(staged + row * staged_row + column) =
            make_float2(sums[half][j][2 * lower], sums[half][j][2 * lower + 1]);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < block_rows * 16; i += threads) {
    const int row = i / 16, column = i % 16 * 8;
    if (first_row + row >= args.m || first_column + column >= args.n) continue;
    bf16* const to = static_cast<bf16*>(args.c) + (first_row + row) * args.c_stride + first_column + column;
    float value[8], old[8] = {};
    read(staged + row * staged_row + column, value);
    if (args.beta != 0) read(to, old);
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = args.alpha * value[j] + args.beta * old[j];
    write(to, value);
  }
}

// ---- c[m, n] = aᵀ[m, k] b[k, n], small m
// -----------------------------------------------------------------------------

constexpr int block_k = 1536;  // k of a block (split-K); a second kernel adds the blocks' sums in order
constexpr int stages = 2;

/// A block computes `Bands` bands of rows x 64 columns over block_k of k. Several warps share a band: each takes 16 k
/// of every stage.
template <int Bands>
struct Transposed {
  static constexpr int rows = Bands * band;
  static constexpr int slices = warps / Bands;
  static constexpr int stage_k = 16 * slices;
  static constexpr int a_row = rows + 4;  // fp32 values of a row, padded so that rows two apart start in different banks
  static constexpr int b_bytes = stage_k * tile_row_bytes;
  static constexpr int stage_bytes = b_bytes + stage_k * a_row * 4;
};

template <int Bands>
__global__ void __launch_bounds__(threads, 2) transposed_kernel(mimo_gemm_args args, float* sums_of_blocks) {
  using Cut = Transposed<Bands>;
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first_row = static_cast<int64_t>(blockIdx.z) * Cut::rows;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * 64;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * block_k;
  const int64_t end = smaller(begin + block_k, args.k);
  const int steps = static_cast<int>(ceil_div(end - begin, Cut::stage_k));
  const float* const a = static_cast<const float*>(args.a);
  const bf16* const b = static_cast<const bf16*>(args.b);
  const auto fetch = [&](int step) {
    char* const stage = shared + step % stages * Cut::stage_bytes;
    const int64_t from = begin + step * Cut::stage_k;
    for (int i = threadIdx.x; i < Cut::stage_k * 8; i += threads) {
      const int row = i / 8, chunk = i % 8;
      const bool live = from + row < end && first_column + 8 * chunk < args.n;
      copy_async(stage + tile_offset(row, chunk), live ? b + (from + row) * args.b_stride + first_column + 8 * chunk : b, live);
    }
    for (int i = threadIdx.x; i < Cut::stage_k * Cut::rows / 4; i += threads) {
      const int row = i / (Cut::rows / 4), column = i % (Cut::rows / 4) * 4;
      const bool live = from + row < end;
      copy_async(stage + Cut::b_bytes + (row * Cut::a_row + column) * 4,
                 live ? a + (from + row) * args.a_stride + first_row + column : a, live);
    }
  };
  const int own_band = warp % Bands, own_k = warp / Bands * 16;
  float sums[2][8][4] = {};
  fetch(0);
  copy_commit();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch(step + 1);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    const char* const stage = shared + step % stages * Cut::stage_bytes;
    const float* const left = reinterpret_cast<const float*>(stage + Cut::b_bytes) + own_band * band;
    add_products(sums, stage, own_k, [&](int row, int k) {
      const float* const from = left + (own_k + k) * Cut::a_row + row;
      return float2{from[0], from[Cut::a_row]};
    });
    __syncthreads();
  }
  // The warps of a band add their sums one after another, in a fixed order.
  float* const total = reinterpret_cast<float*>(shared);
  for (int slice = 0; slice < Cut::slices; ++slice) {
    if (warp / Bands == slice) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = own_band * band + 16 * half + i / 2 * 8 + lane / 4, column = 8 * j + 2 * (lane % 4) + i % 2;
            float& to = total[row * 64 + column];
            to = slice == 0 ? sums[half][j][i] : to + sums[half][j][i];
          }
        }
      }
    }
    __syncthreads();
  }
  float* const to = sums_of_blocks + (blockIdx.y * args.m + first_row) * args.n + first_column;
  for (int i = threadIdx.x; i < Cut::rows * 16; i += threads) {
    const int row = i / 16, column = i % 16 * 4;
    if (first_column + column >= args.n) continue;
    *reinterpret_cast<float4*>(to + row * args.n + column) = *reinterpret_cast<const float4*>(total + row * 64 + column);
  }
}

/// Split-K reduction: c = alpha Σ_block sums + beta c, in the order of the blocks.
__global__ void add_blocks_kernel(mimo_gemm_args args, const float* sums_of_blocks, int64_t blocks) {
  float* const c = static_cast<float*>(args.c);
  for_each_pack(args.m, args.n / 4, [&](int64_t row, int64_t pack) {
    const int64_t at = row * args.n + 4 * pack;
    float sum[4] = {}, value[4];
    for (int64_t block = 0; block < blocks; ++block) {
      read(sums_of_blocks + block * args.m * args.n + at, value);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += value[i];
    }
    float* const to = c + row * args.c_stride + 4 * pack;
    if (args.beta != 0) read(to, value);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = args.alpha * sum[i] + (args.beta != 0 ? args.beta * value[i] : 0.0f);
    write(to, sum);
  });
}

template <int Bands>
void multiply_transposed(mimo_stream& stream, const mimo_gemm_args& args, float* sums_of_blocks, int64_t blocks) {
  using Cut = Transposed<Bands>;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.n, 64)), static_cast<unsigned>(blocks),
                  static_cast<unsigned>(args.m / Cut::rows));
  launch(stream, transposed_kernel<Bands>, grid, dim3(threads), stages * Cut::stage_bytes, args, sums_of_blocks);
}

bool whole_pieces(const void* address, int64_t stride, int64_t element) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0 && stride * element % 16 == 0;
}

}  // namespace

bool mixed_gemm_fits(const mimo_gemm_args& args) {
  const bool types = args.a_dtype == MIMO_DTYPE_F32 && args.b_dtype == MIMO_DTYPE_BF16 && args.batch == 1;
  if (!types || args.transpose_b != 0 || args.bias != nullptr || args.n % 8 != 0) return false;
  const int64_t element = args.c_dtype == MIMO_DTYPE_BF16 ? 2 : 4;
  if (!whole_pieces(args.a, args.a_stride, 4) || !whole_pieces(args.b, args.b_stride, 2) ||
      !whole_pieces(args.c, args.c_stride, element)) {
    return false;
  }
  if (args.transpose_a != 0) {
    return args.c_dtype == MIMO_DTYPE_F32 && args.m % band == 0 && ceil_div(args.k, block_k) <= 65535;
  }
  return args.c_dtype == MIMO_DTYPE_BF16 && args.k % 16 == 0 && args.k <= most_k &&
         ceil_div(args.m, block_rows) <= 65535;
}

void sm80_mixed_gemm(mimo_stream& stream, const mimo_gemm_args& args) {
  if (args.transpose_a == 0) {
    const dim3 grid(static_cast<unsigned>(ceil_div(args.n, block_columns)),
                    static_cast<unsigned>(ceil_div(args.m, block_rows)));
    const int64_t bytes = larger(2 * args.k * tile_row_bytes, block_rows * staged_row * 4);
    return launch(stream, few_k_kernel, grid, dim3(threads), bytes, args);
  }
  const int64_t blocks = ceil_div(args.k, block_k);
  Workspace sums(&stream, blocks * args.m * args.n * 4);
  float* const to = sums.as<float>();
  if (args.m % (4 * band) == 0) {
    multiply_transposed<4>(stream, args, to, blocks);
  } else if (args.m % (2 * band) == 0) {
    multiply_transposed<2>(stream, args, to, blocks);
  } else {
    multiply_transposed<1>(stream, args, to, blocks);
  }
  const Cover covered = cover(args.m, args.n / 4);
  launch(stream, add_blocks_kernel, covered.grid, covered.block, 0, args, to, blocks);
}

}  // namespace mimo::cuda
