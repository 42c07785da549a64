// Backward of the Mamba-2 chunk scan (SSD) through mma.sync (docs/spec/language-model.md §2.4), with its symbols: w is
// the gradient of Δ x, E = dG ∘ G. dB, dC and dG are summed over the heads of a group in registers. Hopper uses the
// gate's kernel of this file too.
#include "sm80_ssd.cuh"
#include "ssd.h"

namespace mimo::cuda {
namespace {

/// Backward of the gate o = y silu(z): writes dz and dy.
__global__ void gate_kernel(mimo_ssd_backward_args args, bf16* dy) {
  const int64_t width = args.heads * args.head_dim;
  for_each_pack(args.tokens, width / 8, [&](int64_t token, int64_t pack) {
    const int64_t column = pack * 8, at = token * width + column;
    float gate[8], gradient[8], y[8], dz[8];
    read(static_cast<const bf16*>(args.z) + token * args.z_stride + column, gate);
    read(static_cast<const bf16*>(args.d_o) + at, gradient);
    read(static_cast<const bf16*>(args.y) + at, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float s = sigmoid(gate[i]);
      dz[i] = gradient[i] * y[i] * s * (1.0f + gate[i] * (1.0f - s));
      gradient[i] *= gate[i] * s;
    }
    write(static_cast<bf16*>(args.dz) + token * args.dz_stride + column, dz);
    write(dy + at, gradient);
  });
}

/// Partial row and column sums, one set for each warp that contributes.
struct Parts {
  float e_rows[2][ssd_chunk], e_columns[4][ssd_chunk];
  float x_dot[2][ssd_chunk], b_dot[2][ssd_chunk], c_dot[2][ssd_chunk];
};

/// Computes the gradients of a head's Δ, dt_bias and A_log over a chunk. One warp; lane l handles tokens 2 l and 2 l +
/// 1.
__device__ __forceinline__ void finish_steps(const mimo_ssd_backward_args& args, const Piece& piece, int64_t head,
                                             const SsdTokens& tokens, const Parts& parts, float carried, float d_sum,
                                             SsdHeadSums& to) {
  const int lane = threadIdx.x % 32, count = static_cast<int>(piece.count);
  float inside[2], before[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    inside[i] = parts.e_rows[0][t] + parts.e_rows[1][t] + parts.c_dot[0][t] + parts.c_dot[1][t];
#pragma unroll
    for (int j = 0; j < 4; ++j) inside[i] -= parts.e_columns[j][t];
    before[i] = tokens.step[t] * (parts.b_dot[0][t] + parts.b_dot[1][t]);
  }
  // da_k = Σ_{i>=k} (row sum - column sum of E + c_dot)_i + Σ_{j<k} b_dot_j + carried
  float suffix = inside[0] + inside[1], prefix = before[0] + before[1];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float later = __shfl_down_sync(all_lanes, suffix, offset);
    const float earlier = __shfl_up_sync(all_lanes, prefix, offset);
    if (lane + offset < 32) suffix += later;
    if (lane >= offset) prefix += earlier;
  }
  prefix -= before[0] + before[1];
  const float da[2] = {suffix + prefix + carried, suffix - inside[0] + prefix + before[0] + carried};
  const float a = -expf(args.a_log[head]);
  float a_log = 0, dt_bias = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    if (t >= count) continue;
    const int64_t token = piece.begin + t;
    const float argument = load(static_cast<const bf16*>(args.dt) + token * args.dt_stride + head) + args.dt_bias[head];
    const float slope = tokens.step[t] <= args.dt_minimum ? 0.0f : sigmoid(argument);
    const float gradient = (parts.x_dot[0][t] + parts.x_dot[1][t] + a * da[i]) * slope;
    store(static_cast<bf16*>(args.ddt) + token * args.ddt_stride + head, gradient);
    a_log += a * da[i] * tokens.step[t];
    dt_bias += gradient;
  }
  a_log = warp_sum(a_log);
  dt_bias = warp_sum(dt_bias);
  if (lane == 0) to = SsdHeadSums{d_sum, a_log, dt_bias};
}

template <int N>
__global__ void __launch_bounds__(ssd_block) backward_kernel(mimo_ssd_backward_args args, SsdDecays decays,
                                                             const bf16* dy_all, const bf16* states,
                                                             const bf16* dstates, SsdHeadSums* sums) {
  extern __shared__ __align__(128) char shared_tiles[];
  __shared__ SsdTokens tokens;
  __shared__ Parts parts;
  __shared__ float shared_sums[2 * 32];
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, ssd_chunk, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t group = blockIdx.y, heads_per_group = args.heads / args.groups;
  const int count = static_cast<int>(piece.count);
  constexpr int wide = N / 64 * ssd_tile_bytes;
  char* const b = shared_tiles;
  char* const c = b + wide;
  char* const state = c + wide;
  char* const dstate = state + wide;
  char* const x = dstate + wide;
  char* const dy = x + ssd_tile_bytes;
  char* const mixed = dy + ssd_tile_bytes;
  const int64_t row = piece.begin * args.xbc_stride;
  fetch_rows(static_cast<const bf16*>(args.b) + row + group * N, args.xbc_stride, count, N, b);
  fetch_rows(static_cast<const bf16*>(args.c) + row + group * N, args.xbc_stride, count, N, c);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  SsdSums<64> g = {}, dg = {};
  SsdSums<N> db = {}, dc = {};
  add_product<N, 64, false, false>(c, b, g);

  for (int64_t head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
    __syncthreads();
    const int64_t state_at = (blockIdx.x * args.heads + head) * ssd_head * N;
    fetch_rows(static_cast<const bf16*>(args.x) + row + head * ssd_head, args.xbc_stride, count, ssd_head, x);
    fetch_rows(dy_all + (piece.begin * args.heads + head) * ssd_head, args.heads * ssd_head, count, ssd_head, dy);
    fetch_rows(states + state_at, N, ssd_head, N, state);
    fetch_rows(dstates + state_at, N, ssd_head, N, dstate);
    copy_commit();
    load_decays({decays.step + head * args.tokens, decays.sum + head * args.tokens}, piece.begin, count, tokens);
    copy_wait<0>();
    __syncthreads();
    float totals[2] = {0, 0};  // carried state term ⟨H_c, dS_c⟩ of the chunk; gradient of D
    for (int index = threadIdx.x; index < ssd_head * N / 2; index += ssd_block) {
      const uint32_t h = reinterpret_cast<const uint32_t*>(state)[index];
      const uint32_t s = reinterpret_cast<const uint32_t*>(dstate)[index];
      totals[0] += lower_bf16(h) * lower_bf16(s) + upper_bf16(h) * upper_bf16(s);
    }
    {
      // Terms within the chunk: dG, E, and the factor of dy in w.
      SsdSums<64> dm = {};
      add_product<64, 64, false, false>(dy, x, dm);
      float rows[2] = {0, 0}, columns[8] = {};
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int at_row = own_row() + lane / 4 + part / 2 * 8;
          const int at_column = own_column<64>() + j * 8 + lane % 4 * 2 + part % 2;
          const float decay = at_column <= at_row ? expf(tokens.sum[at_row] - tokens.sum[at_column]) : 0.0f;
          const float gradient = dm[j][part] * decay * tokens.step[at_column];
          dg[j][part] += gradient;
          const float e = gradient * g[j][part];
          rows[part / 2] += e;
          columns[2 * j + part % 2] += e;
          dm[j][part] = g[j][part] * decay;
        }
      }
      put_row_sums(rows[0], rows[1], parts.e_rows);
      put_column_sums(columns, parts.e_columns);
      for_each_pair<64>(dm, [&](int i, int j, float first, float second, int) { put_pair(mixed, i, j, first, second); });
    }
    {
      // w_j: the term through the state after the chunk, then the term within the chunk.
      SsdSums<64> w = {};
      add_product<N, 64, false, false>(b, dstate, w);
      float dots[2] = {0, 0};
      for_each_pair<64>(w, [&](int j, int k, float& first, float& second, int half) {
        const uint32_t own = pair_at(x, j, k);
        first *= tokens.to_end[j];
        second *= tokens.to_end[j];
        dots[half] += first * lower_bf16(own) + second * upper_bf16(own);
      });
      put_row_sums(dots[0], dots[1], parts.b_dot);
      __syncthreads();
      add_product<64, 64, true, true>(mixed, dy, w);
      const float d = args.d[head];
      float x_dots[2] = {0, 0};
      for_each_pair<64>(w, [&](int j, int k, float first, float second, int half) {
        const uint32_t own = pair_at(x, j, k), gradient = pair_at(dy, j, k);
        x_dots[half] += first * lower_bf16(own) + second * upper_bf16(own);
        totals[1] += lower_bf16(gradient) * lower_bf16(own) + upper_bf16(gradient) * upper_bf16(own);
        if (j >= count) return;
        const int64_t at = (piece.begin + j) * args.dxbc_stride + head * ssd_head + k;
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(args.dx) + at) = pack_bf16(
            tokens.step[j] * first + d * lower_bf16(gradient), tokens.step[j] * second + d * upper_bf16(gradient));
      });
      put_row_sums(x_dots[0], x_dots[1], parts.x_dot);
    }
    {
      SsdSums<N> through = {};
      add_product<64, N, false, true>(x, dstate, through);
      const int first_row = own_row() + threadIdx.x % 32 / 4;
      const float upper = tokens.to_end[first_row] * tokens.step[first_row];
      const float lower = tokens.to_end[first_row + 8] * tokens.step[first_row + 8];
#pragma unroll
      for (int j = 0; j < N / 16; ++j) {
#pragma unroll
        for (int part = 0; part < 4; ++part) db[j][part] += (part < 2 ? upper : lower) * through[j][part];
      }
    }
    {
      // Terms through the state before the chunk.
      SsdSums<N> through = {};
      add_product<64, N, false, true>(dy, state, through);
      float dots[2] = {0, 0};
      for_each_pair<N>(through, [&](int i, int m, float& first, float& second, int half) {
        const uint32_t own = pair_at(c, i, m);
        first *= tokens.from_start[i];
        second *= tokens.from_start[i];
        dots[half] += first * lower_bf16(own) + second * upper_bf16(own);
      });
      put_row_sums(dots[0], dots[1], parts.c_dot);
#pragma unroll
      for (int j = 0; j < N / 16; ++j) {
#pragma unroll
        for (int part = 0; part < 4; ++part) dc[j][part] += through[j][part];
      }
    }
    block_sum(totals, shared_sums);
    if (threadIdx.x < 32) {
      const float carried = tokens.from_start[count - 1] * totals[0];
      finish_steps(args, piece, head, tokens, parts, carried, totals[1], sums[blockIdx.x * args.heads + head]);
    }
  }
  __syncthreads();
  for_each_pair<64>(dg, [&](int i, int j, float first, float second, int) { put_pair(mixed, i, j, first, second); });
  __syncthreads();
  add_product<64, N, false, true>(mixed, b, dc);
  add_product<64, N, true, true>(mixed, c, db);
  const int64_t to = piece.begin * args.dxbc_stride + group * N;
  const auto put = [&](SsdSums<N>& sum, void* gradient) {
    for_each_pair<N>(sum, [&](int t, int m, float first, float second, int) {
      if (t >= count) return;
      *reinterpret_cast<uint32_t*>(static_cast<bf16*>(gradient) + to + t * args.dxbc_stride + m) =
          pack_bf16(first, second);
    });
  };
  put(dc, args.dc);
  put(db, args.db);
}

}  // namespace

void sm80_bf16_ssd_gate(mimo_stream& stream, const mimo_ssd_backward_args& args, void* dy) {
  if (args.z_factors != nullptr) {
    ssd_masked_gate(stream, args, dy, MIMO_DTYPE_BF16);
  } else {
    const auto [grid, block] = cover(args.tokens, args.heads * args.head_dim / 8);
    launch(stream, gate_kernel, grid, block, 0, args, static_cast<bf16*>(dy));
  }
}

void sm80_bf16_ssd_backward(mimo_stream& stream, const mimo_ssd_backward_args& args) {
  const int64_t n = args.state_dim, pieces = piece_count(args.tokens, args.sequences, ssd_chunk);
  const int64_t elements = ssd_head * n, state_elements = pieces * args.heads * elements;
  Workspace decay_space(&stream, 2 * args.heads * args.tokens * 4);
  Workspace added_space(&stream, state_elements * 4);
  Workspace state_space(&stream, 2 * state_elements * 2);
  Workspace dy_space(&stream, args.tokens * args.heads * ssd_head * 2);
  Workspace sum_space(&stream, pieces * args.heads * static_cast<int64_t>(sizeof(SsdHeadSums)));
  float* const step = decay_space.as<float>();
  float* const sum = step + args.heads * args.tokens;
  float* const added = added_space.as<float>();
  bf16* const states = state_space.as<bf16>();
  bf16* const dstates = states + state_elements;
  bf16* const dy = dy_space.as<bf16>();
  const SsdDecays decays{step, sum};
  ssd_decays(stream, args.dt, args.dt_stride, args.dt_bias, args.a_log, args.dt_minimum, args.cu_seqlens,
             args.sequences, args.tokens, args.heads, ssd_chunk, args.dtype, step, sum);
  sm80_bf16_ssd_gate(stream, args, dy);
  const auto make_states = [&](const bf16* a, int64_t a_stride, const void* b, bool of_end, bf16* to) {
    sm80_bf16_ssd_chunk_states(stream, a, a_stride, static_cast<const bf16*>(b), args.xbc_stride, decays, of_end,
                               args.cu_seqlens, args.sequences, args.tokens, args.heads, args.groups, n, added);
    ssd_pass(stream, !of_end, added, to, MIMO_DTYPE_BF16, nullptr, sum, args.cu_seqlens, args.sequences, args.tokens, args.heads,
             elements, ssd_chunk);
  };
  make_states(static_cast<const bf16*>(args.x), args.xbc_stride, args.b, true, states);
  make_states(dy, args.heads * ssd_head, args.c, false, dstates);
  const auto run = [&](auto size) {
    launch(stream, backward_kernel<size>, grid_of(pieces, args.groups), dim3(ssd_block),
           (4 * size / 64 + 3) * ssd_tile_bytes, args, decays, static_cast<const bf16*>(dy),
           static_cast<const bf16*>(states), static_cast<const bf16*>(dstates), sum_space.as<SsdHeadSums>());
  };
  if (n == 64) {
    run(std::integral_constant<int, 64>{});
  } else {
    run(std::integral_constant<int, 128>{});
  }
  ssd_add_head_sums(stream, sum_space.as<SsdHeadSums>(), args.cu_seqlens, args.sequences, pieces, args.heads, ssd_chunk,
                    args.dd, args.da_log, args.ddt_bias);
}

}  // namespace mimo::cuda
