// Backward of the Mamba-2 chunk scan (SSD) on Hopper (docs/spec/language-model.md §2.4), with its symbols: w is the
// gradient of Δ x, E = dG ∘ G.
//
// Persistent blocks take a chunk and a group at a time and loop over the group's heads. The first warpgroup holds the
// service warps: TMA loads of the heads' x, dy and states; TMA loads of B and C; and a warp that turns sums into the
// gradients of dt and A. The second computes the terms of token pairs, transposed (tokens j as rows, i >= j as
// columns), so that the decayed scores are already in registers as the left operand for w. The third computes dB and
// dC, summed over the heads in registers.
#include "sm90_ssd_backward.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;
using namespace sm90::ssd_backward;

constexpr int threads = 3 * 128;
/// setmaxnreg, of 64 Ki registers: 128 service threads keep 56, 128 pair threads get 208, 128 state threads 240.
constexpr int service_registers = 56, pair_registers = 208, state_registers = 240;

// ---- second warpgroup: pairs of tokens -------------------------------------------------------------------------

/// Butterfly step: exchanges with lane ^ 2 Kept; each lane keeps half of the sums, with the other lane's part added.
template <int Kept>
__device__ __forceinline__ void add_half(float (&sum)[16], int lane) {
  const bool upper = lane & (2 * Kept);
#pragma unroll
  for (int j = 0; j < Kept; ++j) {
    const float given = upper ? sum[j] : sum[j + Kept], own = upper ? sum[j + Kept] : sum[j];
    sum[j] = own + __shfl_xor_sync(all_lanes, given, 2 * Kept);
  }
}
/// Sums 64 columns over a warp's 16 rows; a lane passes its part of 16 columns. Returns the sums of columns 8 (lane /
/// 4) + 2 (lane % 4) and the next.
__device__ __forceinline__ float2 column_sums(float (&sum)[16], int lane) {
  add_half<8>(sum, lane);
  add_half<4>(sum, lane);
  add_half<2>(sum, lane);
  return make_float2(sum[0], sum[1]);
}

/// Sum of this thread's elements on the diagonal of a product; only lanes 4 r + r / 2 hold two.
__device__ __forceinline__ float diagonal(const float (&sum)[32], const SsdPlace& own) {
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    if (warp == own.warp) total = own.lane & 4 ? sum[8 * warp + 1] + sum[8 * warp + 7] : sum[8 * warp] + sum[8 * warp + 6];
  }
  return total;
}
__device__ __forceinline__ void put_diagonal(const float (&sum)[32], const SsdPlace& own, float (&to)[32]) {
  if (own.lane / 8 == own.lane % 4) to[own.warp * 8 + own.lane / 4] = diagonal(sum, own);
}

/// From dmᵀ = x dyᵀ: adds to dGᵀ, sums E, and sets `mixed` to the decayed scores as a left operand.
__device__ __forceinline__ void differentiate_scores(const float (&dm)[32], const float (&g)[32], float (&dg)[32],
                                                     const SsdChunkTokens& tokens, const SsdPlace& own, Parts& parts,
                                                     uint32_t (&mixed)[16]) {
  const float sum[2] = {tokens.sum[own.row], tokens.sum[own.row + 8]};
  const float step[2] = {tokens.step[own.row], tokens.step[own.row + 8]};
  float rows[2] = {0, 0}, columns[16];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k < own.warp) {
#pragma unroll
      for (int i = 0; i < 4; ++i) mixed[4 * k + i] = 0, columns[4 * k + i] = 0;
      continue;
    }
#pragma unroll
    for (int j = 2 * k; j < 2 * k + 2; ++j) {
      const int column = 8 * j + own.column;
      const float2 other = pair_at(tokens.sum, column);
      columns[2 * j] = columns[2 * j + 1] = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float decay[2] = {exp2_fast(other.x - sum[half]), exp2_fast(other.y - sum[half])};
        if (k == own.warp) {
          const int row = own.row + 8 * half;
          if (column < row) decay[0] = 0;
          if (column + 1 < row) decay[1] = 0;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 4 * j + 2 * half + i;
          const float gradient = dm[at] * decay[i], stepped = gradient * step[half];
          dg[at] += stepped;
          rows[half] += gradient * g[at];
          columns[2 * j + i] += stepped * g[at];
          decay[i] *= g[at];
        }
        mixed[2 * j + half] = pack_bf16(decay[0], decay[1]);
      }
    }
  }
  const float upper = quad_sum(rows[0]), lower = quad_sum(rows[1]);
  if (own.column == 0) parts.inside[own.row] = upper, parts.inside[own.row + 8] = lower;
  const float2 sums = column_sums(columns, own.lane);
  *reinterpret_cast<float2*>(&parts.e_rows[own.warp][own.lane / 4 * 8 + own.column]) = sums;
}

template <int N>
__device__ __forceinline__ void compute_pairs(const Problem& problem, Shared<N>& shared) {
  const SsdPlace own = own_place();
  const bool writes = threadIdx.x % 128 == 0;
  for (int k = 0, step_number = 0;; ++k) {
    wait(&shared.operands_full, k & 1);
    const Work work = shared.work;
    if (work.count == 0) break;
    float g[32], dg[32];
    begin_products();
    queue_product<N / 16, false, false>(g, shared.b[0], shared.c[0], false);
    commit_products();
#pragma unroll
    for (float& value : dg) value = 0;
    wait_products<0>();
    settle(g);
    for (int i = 0; i < problem.heads; ++i, ++step_number) {
      const int slot = step_number % stages, head = work.group * problem.heads + i;
      const typename Shared<N>::Stage& stage = shared.stage[slot];
      const SsdChunkTokens& tokens = shared.tokens[slot];
      Parts& parts = shared.parts[step_number % 2];
      char* const dx = shared.dx[step_number % 2];
      const float d = problem.args.d[head];
      wait(&shared.full[slot], step_number / stages & 1);
      float dm[32], w[32];
      begin_products();
      queue_product<4, false, false>(dm, stage.x, stage.dy, false);
      commit_products();
      queue_product<N / 16, false, false>(w, shared.b[0], stage.dstate[0], false);
      commit_products();
      wait(&shared.parts_empty[step_number % 2], (step_number / 2 & 1) ^ 1);
      wait_products<1>();
      settle(dm);
      put_diagonal(dm, own, parts.d);
      uint32_t mixed[16];
      differentiate_scores(dm, g, dg, tokens, own, parts, mixed);
      const float to_end[2] = {tokens.to_end[own.row], tokens.to_end[own.row + 8]};
      const float step[2] = {tokens.step[own.row], tokens.step[own.row + 8]};
      wait_products<0>();
      settle(w);
      // w_j: the term through the state after the chunk, then the term within the chunk.
      float b_dot[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = 4 * j + 2 * half;
          const uint32_t x = pair_of(stage.x, own, j, half);
          w[at] *= to_end[half], w[at + 1] *= to_end[half];
          b_dot[half] += w[at] * lower_bf16(x) + w[at + 1] * upper_bf16(x);
        }
      }
      begin_products();
      queue_product(w, mixed, stage.dy);
      commit_products();
      b_dot[0] = quad_sum(b_dot[0]), b_dot[1] = quad_sum(b_dot[1]);
      if (own.column == 0) parts.b_dot[own.row] = b_dot[0], parts.b_dot[own.row + 8] = b_dot[1];
      uint32_t dy[16];  // loaded in full before dx is written: the compiler cannot tell that dx does not alias it
#pragma unroll
      for (int j = 0; j < 16; ++j) dy[j] = pair_of(stage.dy, own, j / 2, j % 2);
      wait_products<0>();
      settle(w);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float part = step[j % 2];
        pair_of(dx, own, j / 2, j % 2) = pack_bf16(part * w[2 * j] + d * lower_bf16(dy[j]),
                                                   part * w[2 * j + 1] + d * upper_bf16(dy[j]));
      }
      // ⟨H_c, dS_c⟩ is the trace of H_c dS_cᵀ.
      begin_products();
      queue_product<N / 16, false, false>(w, stage.state[0], stage.dstate[0], false);
      commit_products();
      publish_stores();
      if (writes) wait_read<0>();  // the other dx buffer is free
      meet<1, 128>();
      if (writes) write_head_tile(dx, problem.dx, head, work.row, work.first, work.last);
      wait_products<0>();
      settle(w);
      put_diagonal(w, own, parts.states);
      arrive_warp(&shared.empty[slot]);
      arrive_warp(&shared.parts_full[step_number % 2]);
    }
    uint32_t packed[16];
    pack_tile(dg, packed);
    store_tile(shared.dg, own, packed);
    publish_stores();
    meet<2, 256>();
  }
  if (writes) wait_read<0>();
}

// ---- third warpgroup: states, dB, dC ---------------------------------------------------------------------------

/// Adds a head's b_j to dB and c_i to dC, and writes C_i · c_i.
template <int N>
__device__ __forceinline__ void add_head(const Shared<N>& shared, int slot, const SsdPlace& own, float (&db)[N / 64][32],
                                         float (&dc)[N / 64][32], float (&dots)[2]) {
  constexpr int slices = N / 64;
  const typename Shared<N>::Stage& stage = shared.stage[slot];
  const SsdChunkTokens& tokens = shared.tokens[slot];
  float b_part[32], c_part[32];
  begin_products();
  queue_product<4, false, true>(b_part, stage.x, stage.dstate[0], false);
  commit_products();
  queue_product<4, false, true>(c_part, stage.dy, stage.state[0], false);
  commit_products();
  const float weight[2] = {tokens.weight[own.row], tokens.weight[own.row + 8]};
  const float from_start[2] = {tokens.from_start[own.row], tokens.from_start[own.row + 8]};
  dots[0] = dots[1] = 0;
#pragma unroll
  for (int slice = 0; slice < slices; ++slice) {
    wait_products<1>();
    settle(b_part);
#pragma unroll
    for (int j = 0; j < 32; ++j) db[slice][j] += weight[j / 2 % 2] * b_part[j];
    if (slice + 1 < slices) {
      begin_products();
      queue_product<4, false, true>(b_part, stage.x, stage.dstate[slice + 1], false);
      commit_products();
      wait_products<1>();
    } else {
      wait_products<0>();
    }
    settle(c_part);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * j + 2 * half;
        const uint32_t c = pair_of(shared.c[slice], own, j, half);
        dots[half] += c_part[at] * lower_bf16(c) + c_part[at + 1] * upper_bf16(c);
        dc[slice][at] += from_start[half] * c_part[at], dc[slice][at + 1] += from_start[half] * c_part[at + 1];
      }
    }
    if (slice + 1 < slices) {
      begin_products();
      queue_product<4, false, true>(c_part, stage.dy, stage.state[slice + 1], false);
      commit_products();
    }
  }
  dots[0] = from_start[0] * quad_sum(dots[0]), dots[1] = from_start[1] * quad_sum(dots[1]);
}

template <int N>
__device__ __forceinline__ void compute_states(const Problem& problem, Shared<N>& shared) {
  constexpr int slices = N / 64;
  const SsdPlace own = own_place();
  for (int k = 0, step_number = 0;; ++k) {
    wait(&shared.operands_full, k & 1);
    const Work work = shared.work;
    if (work.count == 0) break;
    float db[slices][32] = {}, dc[slices][32] = {};
    for (int i = 0; i < problem.heads; ++i, ++step_number) {
      const int slot = step_number % stages;
      wait(&shared.full[slot], step_number / stages & 1);
      float dots[2];
      add_head(shared, slot, own, db, dc, dots);
      arrive_warp(&shared.empty[slot]);
      wait(&shared.parts_empty[step_number % 2], (step_number / 2 & 1) ^ 1);
      Parts& parts = shared.parts[step_number % 2];
      if (own.column == 0) parts.c_dot[own.row] = dots[0], parts.c_dot[own.row + 8] = dots[1];
      arrive_warp(&shared.parts_full[step_number % 2]);
    }
    meet<2, 256>();
    begin_products();
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) {
      queue_product<4, false, true>(db[slice], shared.dg, shared.c[slice], true);
      queue_product<4, true, true>(dc[slice], shared.dg, shared.b[slice], true);
    }
    commit_products();
    wait_products<0>();
    meet<3, 128>();  // dB and dC take the memory of B and C
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) {
      uint32_t packed[16];
      settle(db[slice]);
      pack_tile(db[slice], packed);
      store_tile(shared.b[slice], own, packed);
      settle(dc[slice]);
      pack_tile(dc[slice], packed);
      store_tile(shared.c[slice], own, packed);
    }
    publish_stores();
    meet<3, 128>();
    if (threadIdx.x % 128 == 0) {
#pragma unroll
      for (int slice = 0; slice < slices; ++slice) {
        const int tile = work.group * slices + slice;
        write_head_tile(shared.b[slice], problem.db, tile, work.row, work.first, work.last);
        write_head_tile(shared.c[slice], problem.dc, tile, work.row, work.first, work.last);
      }
      wait_read<0>();
    }
    arrive_warp(&shared.operands_empty);
  }
}

// ---- kernels ---------------------------------------------------------------------------------------------------

template <int N>
__global__ void __launch_bounds__(threads, 1) backward_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  Shared<N>& shared = *reinterpret_cast<Shared<N>*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  if (threadIdx.x == 0) {
    initialise(&shared.operands_full, 1), initialise(&shared.operands_empty, 5);
    for (int i = 0; i < stages; ++i) initialise(&shared.full[i], 1), initialise(&shared.empty[i], 8);
    for (int i = 0; i < 2; ++i) initialise(&shared.parts_full[i], 8), initialise(&shared.parts_empty[i], 1);
    publish_barriers();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    shrink_registers<service_registers>();
    if (threadIdx.x == 0) {
      fetch_heads(problem, shared);
    } else if (threadIdx.x == 32) {
      fetch_operands(problem, shared);
    } else if (threadIdx.x >= 96) {
      finish_steps(problem, shared);
    }
  } else if (warpgroup == 1) {
    grow_registers<pair_registers>();
    compute_pairs(problem, shared);
  } else {
    grow_registers<state_registers>();
    compute_states(problem, shared);
  }
#endif
}

}  // namespace

void sm90_bf16_ssd_backward(mimo_stream& stream, const mimo_ssd_backward_args& args) {
  const int64_t pieces = piece_count(args.tokens, args.sequences, ssd_chunk), slices = args.state_dim / 64;
  const int64_t width = args.heads * ssd_head, state_elements = pieces * args.heads * slices * ssd_tile_elements;
  Workspace token_space(&stream, pieces * args.heads * static_cast<int64_t>(sizeof(SsdChunkTokens)));
  Workspace state_space(&stream, 2 * state_elements * 2);
  Workspace dy_space(&stream, args.tokens * width * 2);
  Workspace sum_space(&stream, pieces * args.heads * static_cast<int64_t>(sizeof(SsdHeadSums)));
  SsdChunkTokens* const tokens = token_space.as<SsdChunkTokens>();
  Problem problem;
  problem.x = heads_map(args.x, args.heads, ssd_head, ssd_head, args.xbc_stride, ssd_chunk);
  problem.b = heads_map(args.b, args.groups * slices, ssd_head, ssd_head, args.xbc_stride, ssd_chunk);
  problem.c = heads_map(args.c, args.groups * slices, ssd_head, ssd_head, args.xbc_stride, ssd_chunk);
  problem.dy = heads_map(dy_space.as<bf16>(), args.heads, ssd_head, ssd_head, width, ssd_chunk);
  problem.dx = heads_map(args.dx, args.heads, ssd_head, ssd_head, args.dxbc_stride, ssd_chunk);
  problem.db = heads_map(args.db, args.groups * slices, ssd_head, ssd_head, args.dxbc_stride, ssd_chunk);
  problem.dc = heads_map(args.dc, args.groups * slices, ssd_head, ssd_head, args.dxbc_stride, ssd_chunk);
  problem.args = args;
  problem.states = state_space.as<bf16>();
  problem.dstates = problem.states + state_elements;
  problem.tokens = tokens;
  problem.sums = sum_space.as<SsdHeadSums>();
  problem.heads = static_cast<int>(args.heads / args.groups);
  problem.units = static_cast<int>(pieces * args.groups);
  sm90_bf16_ssd_tokens(stream, args, tokens);
  sm80_bf16_ssd_gate(stream, args, dy_space.as<bf16>());
  const SsdSizes sizes{args.cu_seqlens, args.sequences, args.tokens, args.heads, args.groups, args.state_dim};
  const SsdCarry carries[2] = {{problem.x, problem.b, state_space.as<bf16>(), nullptr, false},
                               {problem.dy, problem.c, state_space.as<bf16>() + state_elements, nullptr, true}};
  sm90_bf16_ssd_states(stream, sizes, tokens, carries, 2);
  const auto run = [&](auto n) {
    launch(stream, backward_kernel<n>, grid_of(smaller(problem.units, stream.device->multiprocessors)), dim3(threads), 1024 + sizeof(Shared<n>), problem);
  };
  if (args.state_dim == 64) {
    run(std::integral_constant<int, 64>{});
  } else {
    run(std::integral_constant<int, 128>{});
  }
  ssd_add_head_sums(stream, sum_space.as<SsdHeadSums>(), args.cu_seqlens, args.sequences, pieces, args.heads, ssd_chunk,
                    args.dd, args.da_log, args.ddt_bias);
}

}  // namespace mimo::cuda
