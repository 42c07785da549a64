// The part of the gated delta rule that does not depend on the state (gated_delta.h): decays, unit factors, (I + A)⁻¹ and P.
// A block owns a chunk and a key head, whose value heads share Q Kᵀ and K Kᵀ.
#include "sm80_gated_delta.cuh"
#include "ssd.cuh"

namespace mimo::cuda {
namespace {

constexpr int side = 16, pitch = ssd_chunk + 4;  // of the inverse's smallest blocks; floats of a row

/// Σ x² of 64 rows of 128, for four threads of each row.
__device__ __forceinline__ float row_square(const char* tiles) {
  const int row = threadIdx.x / 4, part = threadIdx.x % 4;
  float sum = 0;
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    float value[8];
    read(reinterpret_cast<const bf16*>(tiles + part / 2 * ssd_tile_bytes + tile_offset(row, part % 2 * 4 + chunk)), value);
#pragma unroll
    for (const float x : value) sum += x * x;
  }
  sum += __shfl_xor_sync(all_lanes, sum, 1);
  return sum + __shfl_xor_sync(all_lanes, sum, 2);
}

/// Columns of the inverses of the four blocks on the diagonal of I + A, by substitution; a thread owns a column.
__device__ __forceinline__ void invert_diagonal(const float (*a)[pitch], float (*inverse)[pitch]) {
  if (threadIdx.x >= ssd_chunk) return;
  const int first = threadIdx.x / side * side, column = threadIdx.x % side;
  float x[side];
#pragma unroll
  for (int i = 0; i < side; ++i) {
    float value = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) value -= a[first + i][first + j] * x[j];
    x[i] = value;
    inverse[first + i][first + column] = value;
  }
}

/// sum[16, 8] += a[16, 8] b[8, 8] of rows `pitch` floats long, in tf32, which has three bits more than the result is rounded to.
__device__ __forceinline__ void multiply_tf32(float (&sum)[4], const float* a, const float* b) {
  const int lane = threadIdx.x % 32, row = lane / 4, k = lane % 4;
  const auto tf32 = [](float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
  };
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(tf32(a[row * pitch + k])), "r"(tf32(a[(row + 8) * pitch + k])), "r"(tf32(a[row * pitch + k + 4])),
                 "r"(tf32(a[(row + 8) * pitch + k + 4])), "r"(tf32(b[k * pitch + row])), "r"(tf32(b[(k + 4) * pitch + row])));
}

/// The blocks below the diagonal of twice the size: [[X, 0], [C, Y]]⁻¹ = [[X⁻¹, 0], [-Y⁻¹ C X⁻¹, Y⁻¹]]; a warp owns 16 x 8 of a block.
/// Begins and ends with a barrier.
template <int Size>
__device__ __forceinline__ void join_blocks(const float (*a)[pitch], float (*inverse)[pitch], float (*middle)[pitch]) {
  constexpr int tiles = Size / 16 * (Size / 8), blocks = ssd_chunk / (2 * Size);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp / tiles * 2 * Size;
  const int row = warp % tiles / (Size / 8) * 16, column = warp % (Size / 8) * 8;
  const auto product = [&](const float* left, const float* right, float sign, float* to) {
    if (warp >= blocks * tiles) return;
    float sum[4] = {};
#pragma unroll
    for (int k = 0; k < Size; k += 8) multiply_tf32(sum, left + k, right + k * pitch);
    to += lane / 4 * pitch + lane % 4 * 2;
    to[0] = sign * sum[0], to[1] = sign * sum[1], to[8 * pitch] = sign * sum[2], to[8 * pitch + 1] = sign * sum[3];
  };
  float* const between = &middle[first / 2][column];
  __syncthreads();
  product(&a[first + Size + row][first], &inverse[first][first + column], 1, between + row * pitch);
  __syncthreads();
  product(&inverse[first + Size + row][first + Size], between, -1, &inverse[first + Size + row][first + column]);
  __syncthreads();
}

struct Shared {
  union {
    struct {
      char k[2 * ssd_tile_bytes], q[2 * ssd_tile_bytes];
    };
    struct {
      float a[ssd_chunk][pitch], inverse[ssd_chunk][pitch];
    };
  };
  char pairs[ssd_tile_bytes];
  float middle[ssd_chunk / 2][pitch];
  DeltaTokens tokens;
  float first_half;
};

__global__ void __launch_bounds__(ssd_block, 3) chunks_kernel(DeltaInputs in, DeltaChunks chunks) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Piece piece = piece_at(in.cu_seqlens, in.sequences, ssd_chunk, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t key_head = blockIdx.y, heads = in.value_heads / in.key_heads, from = piece.begin * in.qkv_stride + key_head * delta_head;
  const int count = static_cast<int>(piece.count), thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  fetch_rows(in.k + from, in.qkv_stride, count, delta_head, shared.k);
  fetch_rows(in.q + from, in.qkv_stride, count, delta_head, shared.q);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  const float k_square = row_square(shared.k), q_square = row_square(shared.q);
  if (thread % 4 == 0) {
    const bool live = thread / 4 < count;
    shared.tokens.k[thread / 4] = live ? rsqrtf(k_square + 1e-6f) : 0.0f;
    shared.tokens.q[thread / 4] = live ? rsqrtf(q_square + 1e-6f) * rsqrtf(static_cast<float>(delta_head)) : 0.0f;
  }
  SsdSums<64> kk = {}, qk = {};
  add_product<delta_head, 64, false, false>(shared.k, shared.k, kk);
  add_product<delta_head, 64, false, false>(shared.q, shared.k, qk);
  __syncthreads();
  // Above the blocks on the diagonal it stays zero.
  for (int index = thread; index < ssd_chunk * ssd_chunk; index += ssd_block) shared.inverse[index / ssd_chunk][index % ssd_chunk] = 0;

  for (int64_t head = key_head * heads; head < (key_head + 1) * heads; ++head) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * in.value_heads + head;
    // g is zero past the end, so that the sum stays that of the last token.
    float sum = 0, beta = 0;
    if (thread < count) {
      const int64_t ba = (piece.begin + thread) * in.ba_stride + head;
      beta = sigmoid(load(in.b + ba));
      sum = -expf(in.a_log[head]) * softplus(load(in.a + ba) + in.dt_bias[head]);
    }
    if (thread < ssd_chunk) {
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float earlier = __shfl_up_sync(all_lanes, sum, offset);
        if (lane >= offset) sum += earlier;
      }
      if (thread == 31) shared.first_half = sum;
    }
    __syncthreads();
    DeltaTokens& tokens = shared.tokens;
    if (thread < ssd_chunk) {
      tokens.sum[thread] = sum += thread < 32 ? 0.0f : shared.first_half;
      tokens.beta[thread] = beta;
    }
    __syncthreads();
    if (thread < ssd_chunk) {
      const float start = exp_for(in.k, sum), end = exp_for(in.k, tokens.sum[ssd_chunk - 1] - sum);
      tokens.query[thread] = start * tokens.q[thread];
      tokens.read[thread] = beta * start * tokens.k[thread];
      tokens.advance[thread] = end * tokens.k[thread];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int part = 0; part < 4; part += 2) {
        const int row = own_row() + lane / 4 + part * 4, column = own_column<64>() + j * 8 + lane % 4 * 2;
        const float own_sum = tokens.sum[row], own_q = tokens.q[row], own_k = tokens.beta[row] * tokens.k[row];
        float pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float decay = column + i <= row ? exp_for(in.k, own_sum - tokens.sum[column + i]) * tokens.k[column + i] : 0.0f;
          pair[i] = own_q * decay * qk[j][part + i];
          shared.a[row][column + i] = column + i < row ? own_k * decay * kk[j][part + i] : 0.0f;
        }
        put_pair(shared.pairs, row, column, pair[0], pair[1]);
      }
    }
    __syncthreads();
    invert_diagonal(shared.a, shared.inverse);
    join_blocks<side>(shared.a, shared.inverse, shared.middle);
    join_blocks<2 * side>(shared.a, shared.inverse, shared.middle);
    const auto copy = [&](const void* from, void* to, int bytes) {
      for (int i = thread; i < bytes / 16; i += ssd_block) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
    };
    copy(shared.pairs, chunks.pairs + at * delta_tile, ssd_tile_bytes);
    copy(&tokens, chunks.tokens + at, sizeof(DeltaTokens));
    for (int index = thread; index < ssd_chunk * 8; index += ssd_block) {
      const int row = index / 8, column = index % 8 * 8;
      float value[8];
      read(shared.inverse[row] + column, value);
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] = column + i == row ? 0.0f : value[i];
      write(chunks.inverse + at * delta_tile + tile_offset(row, index % 8) / 2, value);
    }
    __syncthreads();
  }
}

}  // namespace

DeltaChunks sm80_bf16_gated_delta_chunks(mimo_stream& stream, const DeltaInputs& in, char* memory) {
  const int64_t chunks = in.pieces() * in.value_heads;
  // Tiles first: bulk copies to swizzled tiles want 128-byte alignment.
  bf16* const tiles = reinterpret_cast<bf16*>(memory);
  const DeltaChunks result{reinterpret_cast<DeltaTokens*>(tiles + 2 * chunks * delta_tile), tiles, tiles + chunks * delta_tile};
  launch(stream, chunks_kernel, grid_of(in.pieces(), in.key_heads), dim3(ssd_block), sizeof(Shared), in, result);
  return result;
}

}  // namespace mimo::cuda
