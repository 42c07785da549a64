// Forward of the Mamba-2 chunk scan (SSD) through mma.sync (docs/spec/language-model.md §2.3): states_kernel computes
// each chunk's contribution S_c to the state, ssd_pass turns these into the states H_c, and output_kernel computes
//
//   y_i = exp(cs_i) H_c C_i + Σ_{j<=i} (C_i · B_j) exp(cs_i - cs_j) Δ_j x_j + D x_i   o = y silu(z)
#include "sm80_ssd.cuh"
#include "ssd.h"

namespace mimo::cuda {
namespace {

struct States {
  SsdDecays decays;
  bool of_end;
  const int32_t* cu_seqlens;
  int64_t sequences, tokens, heads, groups;
};

template <int N>
__global__ void __launch_bounds__(ssd_block) states_kernel(const bf16* a, int64_t a_stride, const bf16* b,
                                                           int64_t b_stride, States s, float* to) {
  extern __shared__ __align__(128) char shared_tiles[];
  __shared__ SsdTokens tokens;
  const Piece piece = piece_at(s.cu_seqlens, s.sequences, ssd_chunk, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t group = blockIdx.y, heads_per_group = s.heads / s.groups;
  const int count = static_cast<int>(piece.count);
  char* const b_tiles = shared_tiles;
  char* const a_tile = shared_tiles + N / 64 * ssd_tile_bytes;
  fetch_rows(b + piece.begin * b_stride + group * N, b_stride, count, N, b_tiles);
  copy_commit();
  for (int64_t head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
    __syncthreads();
    load_decays({s.decays.step + head * s.tokens, s.decays.sum + head * s.tokens}, piece.begin, count, tokens);
    __syncthreads();
    // Stores the rows of a times their decays.
    const bf16* from = a + piece.begin * a_stride + head * ssd_head;
    for (int index = threadIdx.x; index < ssd_chunk * 8; index += ssd_block) {
      const int row = index / 8, chunk = index % 8;
      float value[8] = {};
      if (row < count) read(from + row * a_stride + chunk * 8, value);
      const float weight = s.of_end ? tokens.to_end[row] * tokens.step[row] : tokens.from_start[row];
#pragma unroll
      for (float& one : value) one *= weight;
      write(reinterpret_cast<bf16*>(a_tile + tile_offset(row, chunk)), value);
    }
    copy_wait<0>();
    __syncthreads();
    SsdSums<N> sum = {};
    add_product<64, N, true, true>(a_tile, b_tiles, sum);
    float* out = to + (blockIdx.x * s.heads + head) * ssd_head * N;
    for_each_pair<N>(sum, [&](int p, int n, float x, float y, int) {
      *reinterpret_cast<float2*>(out + p * N + n) = make_float2(x, y);
    });
  }
}

template <int N>
__global__ void __launch_bounds__(ssd_block) output_kernel(mimo_ssd_forward_args args, SsdDecays decays,
                                                           const bf16* states) {
  extern __shared__ __align__(128) char shared_tiles[];
  __shared__ SsdTokens tokens;
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, ssd_chunk, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t group = blockIdx.y, heads_per_group = args.heads / args.groups;
  const int count = static_cast<int>(piece.count);
  char* const b = shared_tiles;
  char* const c = b + N / 64 * ssd_tile_bytes;
  char* const state = c + N / 64 * ssd_tile_bytes;
  char* const x = state + N / 64 * ssd_tile_bytes;
  char* const mixed = x + ssd_tile_bytes;
  const int64_t row = piece.begin * args.xbc_stride;
  fetch_rows(static_cast<const bf16*>(args.b) + row + group * N, args.xbc_stride, count, N, b);
  fetch_rows(static_cast<const bf16*>(args.c) + row + group * N, args.xbc_stride, count, N, c);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  SsdSums<64> scores = {};
  add_product<N, 64, false, false>(c, b, scores);

  for (int64_t head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
    __syncthreads();
    fetch_rows(static_cast<const bf16*>(args.x) + row + head * ssd_head, args.xbc_stride, count, ssd_head, x);
    fetch_rows(states + (blockIdx.x * args.heads + head) * ssd_head * N, N, ssd_head, N, state);
    copy_commit();
    load_decays({decays.step + head * args.tokens, decays.sum + head * args.tokens}, piece.begin, count, tokens);
    __syncthreads();
    for_each_pair<64>(scores, [&](int i, int j, float first, float second, int) {
      const float m0 = j <= i ? first * expf(tokens.sum[i] - tokens.sum[j]) * tokens.step[j] : 0.0f;
      const float m1 = j + 1 <= i ? second * expf(tokens.sum[i] - tokens.sum[j + 1]) * tokens.step[j + 1] : 0.0f;
      put_pair(mixed, i, j, m0, m1);
    });
    copy_wait<0>();
    __syncthreads();
    SsdSums<64> out = {};
    add_product<N, 64, false, false>(c, state, out);
    for_each_pair<64>(out, [&](int i, int, float& first, float& second, int) {
      first *= tokens.from_start[i];
      second *= tokens.from_start[i];
    });
    add_product<64, 64, false, true>(mixed, x, out);
    const float d = args.d[head];
    for_each_pair<64>(out, [&](int i, int k, float first, float second, int) {
      if (i >= count) return;
      const uint32_t own = pair_at(x, i, k);
      const int64_t token = piece.begin + i, at = (token * args.heads + head) * ssd_head + k;
      const uint32_t gates = *reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(args.z) + token * args.z_stride +
                                                                head * ssd_head + k);
      const float y0 = first + d * lower_bf16(own), y1 = second + d * upper_bf16(own);
      float z0 = lower_bf16(gates), z1 = upper_bf16(gates);
      if (args.z_factors != nullptr) {
        z0 *= args.z_factors[head * ssd_head + k];
        z1 *= args.z_factors[head * ssd_head + k + 1];
      }
      if (args.y != nullptr) *reinterpret_cast<uint32_t*>(static_cast<bf16*>(args.y) + at) = pack_bf16(y0, y1);
      *reinterpret_cast<uint32_t*>(static_cast<bf16*>(args.o) + at) =
          pack_bf16(y0 * z0 * sigmoid(z0), y1 * z1 * sigmoid(z1));
    });
  }
}

/// Calls body with std::integral_constant<int, state_dim>.
template <class Body>
void with_state(int64_t state_dim, Body&& body) {
  if (state_dim == 64) {
    body(std::integral_constant<int, 64>{});
  } else {
    body(std::integral_constant<int, 128>{});
  }
}

}  // namespace

void sm80_bf16_ssd_chunk_states(mimo_stream& stream, const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride,
                                const SsdDecays& decays, bool of_end, const int32_t* cu_seqlens, int64_t sequences,
                                int64_t tokens, int64_t heads, int64_t groups, int64_t state_dim, float* to) {
  const States states{decays, of_end, cu_seqlens, sequences, tokens, heads, groups};
  with_state(state_dim, [&](auto n) {
    launch(stream, states_kernel<n>, grid_of(piece_count(tokens, sequences, ssd_chunk), groups), dim3(ssd_block),
           (n / 64 + 1) * ssd_tile_bytes, a, a_stride, b, b_stride, states, to);
  });
}

void sm80_bf16_ssd_forward(mimo_stream& stream, const mimo_ssd_forward_args& args) {
  const int64_t n = args.state_dim, pieces = piece_count(args.tokens, args.sequences, ssd_chunk);
  const int64_t elements = ssd_head * n;
  Workspace decay_space(&stream, 2 * args.heads * args.tokens * 4);
  Workspace added_space(&stream, pieces * args.heads * elements * 4);
  Workspace state_space(&stream, pieces * args.heads * elements * 2);
  float* const step = decay_space.as<float>();
  float* const sum = step + args.heads * args.tokens;
  const SsdDecays decays{step, sum};
  ssd_decays(stream, args.dt, args.dt_stride, args.dt_bias, args.a_log, args.dt_minimum, args.cu_seqlens,
             args.sequences, args.tokens, args.heads, ssd_chunk, args.dtype, step, sum);
  sm80_bf16_ssd_chunk_states(stream, static_cast<const bf16*>(args.x), args.xbc_stride,
                             static_cast<const bf16*>(args.b), args.xbc_stride, decays, true, args.cu_seqlens,
                             args.sequences, args.tokens, args.heads, args.groups, n, added_space.as<float>());
  ssd_pass(stream, false, added_space.as<float>(), state_space.as<void>(), MIMO_DTYPE_BF16, args.final_state, sum, args.cu_seqlens,
           args.sequences, args.tokens, args.heads, elements, ssd_chunk);
  with_state(n, [&](auto size) {
    launch(stream, output_kernel<size>, grid_of(pieces, args.groups), dim3(ssd_block),
           (3 * size / 64 + 2) * ssd_tile_bytes, args, decays, static_cast<const bf16*>(state_space.as<bf16>()));
  });
}

}  // namespace mimo::cuda
