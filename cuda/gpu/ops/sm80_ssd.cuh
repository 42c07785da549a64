// Shared by the chunk-scan (SSD) kernels that use mma.sync, on GPUs other than Hopper: head dimension 64, chunks of 64
// tokens, state dimension 64 or 128, bf16.
//
// A block processes one chunk and loops over the heads of one group, which share B, C and the scores C Bᵀ. Its 8 warps
// partition a 64 x W result into 16 rows (warp / 2) and W / 2 columns (warp % 2). Matrices in shared memory are 64 x 64
// tiles (mma.cuh), wider matrices are several tiles side by side.
#pragma once
#include "mma.cuh"
#include "ssd.cuh"

namespace mimo::cuda {

constexpr int ssd_chunk = 64, ssd_head = 64, ssd_block = 256;
constexpr int ssd_tile_bytes = ssd_chunk * tile_row_bytes;

/// Starts the copy of 64 rows of `width` elements; rows from `count` on are zero-filled.
__device__ __forceinline__ void fetch_rows(const bf16* from, int64_t stride, int count, int width, char* to) {
  const int chunks = width / 8;
  for (int index = threadIdx.x; index < ssd_chunk * chunks; index += ssd_block) {
    const int row = index / chunks, chunk = index % chunks;
    const bool live = row < count;
    copy_async(to + chunk / 8 * ssd_tile_bytes + tile_offset(row, chunk % 8), from + (live ? row * stride + chunk * 8 : 0),
               live);
  }
}

/// Decays of a chunk; tokens past its end have Δ = 0 and the cs of the last token.
struct SsdTokens {
  float sum[ssd_chunk], step[ssd_chunk];
  float to_end[ssd_chunk];      // exp(cs_Q - cs)
  float from_start[ssd_chunk];  // exp(cs)
};
__device__ __forceinline__ void load_decays(const SsdDecays& decays, int64_t first, int count, SsdTokens& tokens) {
  const int t = threadIdx.x;
  if (t >= ssd_chunk) return;
  const float last = decays.sum[first + count - 1];
  const float sum = t < count ? decays.sum[first + t] : last;
  tokens.sum[t] = sum;
  tokens.step[t] = t < count ? decays.step[first + t] : 0.0f;
  tokens.to_end[t] = expf(last - sum);
  tokens.from_start[t] = expf(sum);
}

__device__ __forceinline__ int own_row() { return threadIdx.x / 64 * 16; }
template <int W>
__device__ __forceinline__ int own_column() {
  return threadIdx.x / 32 % 2 * (W / 2);
}

/// This warp's accumulators of a 64 x W result.
template <int W>
using SsdSums = float[W / 16][4];

/// sum += left right over K. left_rows, right_rows: whether that operand's tile rows run along k. Rows beyond 64 of such an operand
/// of up to 64 columns follow the first 64.
template <int K, int W, bool left_rows, bool right_rows>
__device__ __forceinline__ void add_product(const char* left, const char* right, SsdSums<W>& sum) {
  static_assert(K == 64 || !(left_rows || (right_rows && W > 64)));
  const int row = own_row(), column = own_column<W>();
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    uint32_t a[4];
    if constexpr (left_rows) {
      left_k_rows(a, left, row, k);
    } else {
      left_k_major(a, left + k / 64 * ssd_tile_bytes, row, k % 64);
    }
#pragma unroll
    for (int j = 0; j < W / 32; ++j) {
      uint32_t b[4];
      const int at = column + j * 16;
      if constexpr (right_rows) {
        right_k_rows(b, right + at / 64 * ssd_tile_bytes, at % 64, k);
      } else {
        right_k_major(b, right + k / 64 * ssd_tile_bytes, at, k % 64);
      }
      mma(sum[2 * j], a, b[0], b[1]);
      mma(sum[2 * j + 1], a, b[2], b[3]);
    }
  }
}

/// Calls body(row, column, x, y, half) for this thread's pairs of adjacent columns; half is 0 or 1 for its upper or
/// lower row.
template <int W, class Body>
__device__ __forceinline__ void for_each_pair(SsdSums<W>& sum, Body&& body) {
  const int lane = threadIdx.x % 32, row = own_row() + lane / 4, column = own_column<W>() + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < W / 16; ++j) {
    body(row, column + j * 8, sum[j][0], sum[j][1], 0);
    body(row + 8, column + j * 8, sum[j][2], sum[j][3], 1);
  }
}

__device__ __forceinline__ uint32_t pair_at(const char* tiles, int row, int column) {
  return *reinterpret_cast<const uint32_t*>(tiles + column / 64 * ssd_tile_bytes + tile_element(row, column % 64));
}
__device__ __forceinline__ void put_pair(char* tiles, int row, int column, float x, float y) {
  *reinterpret_cast<uint32_t*>(tiles + column / 64 * ssd_tile_bytes + tile_element(row, column % 64)) = pack_bf16(x, y);
}

/// Sums this thread's two rows over the warp's columns and writes them to to[warp % 2][row]: two partial sums a row.
__device__ __forceinline__ void put_row_sums(float first, float second, float (&to)[2][ssd_chunk]) {
  const int lane = threadIdx.x % 32, row = own_row() + lane / 4;
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    first += __shfl_xor_sync(all_lanes, first, offset);
    second += __shfl_xor_sync(all_lanes, second, offset);
  }
  if (lane % 4 == 0) {
    to[threadIdx.x / 32 % 2][row] = first;
    to[threadIdx.x / 32 % 2][row + 8] = second;
  }
}

/// Sums this warp's columns over its 16 rows and writes them to to[warp / 2][column].
__device__ __forceinline__ void put_column_sums(const float (&sum)[8], float (&to)[4][ssd_chunk]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float value = sum[j];
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) value += __shfl_xor_sync(all_lanes, value, offset);
    if (lane < 4) to[threadIdx.x / 64][own_column<64>() + j / 2 * 8 + lane * 2 + j % 2] = value;
  }
}

/// to[piece][head][p][n] = Σ_t weight_t a_t[p] b_t[n] with weight = exp(cs_Q - cs) Δ if of_end, else exp(cs).
void sm80_bf16_ssd_chunk_states(mimo_stream& stream, const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride,
                                const SsdDecays& decays, bool of_end, const int32_t* cu_seqlens, int64_t sequences,
                                int64_t tokens, int64_t heads, int64_t groups, int64_t state_dim, float* to);

}  // namespace mimo::cuda
