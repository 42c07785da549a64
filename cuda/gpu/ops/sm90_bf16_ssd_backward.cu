// Backward of the state space scan on Hopper (docs/spec/language-model.md §2.4). Letters as there: w is the gradient of Δ x,
// E = dG ∘ G.
//
// A block owns a chunk and walks the heads of one group. The first warpgroup serves: a warp has the copy engine bring a head's
// x, dy and states, two multiply the states, and the last turns sums into the gradients of the steps. The second computes
// what belongs to pairs of tokens, transposed, with tokens j as rows and i >= j as columns, so that the decayed scores are in
// registers as the product for w wants them. The third computes dB and dC, which it sums over the heads in registers.
#include "sm90_ssd_backward.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;
using namespace sm90::ssd_backward;

constexpr int threads = 3 * 128;
/// Of 64 Ki: 128 threads keep 40, 128 get 224, 128 get 240.
constexpr int service_registers = 40, pair_registers = 224, state_registers = 240;

// ---- the second ------------------------------------------------------------------------------------------------

/// Lanes 2 Kept apart share 2 Kept sums out: each keeps half of them, with the other's added.
template <int Kept>
__device__ __forceinline__ void add_half(float (&sum)[16], int lane) {
  const bool upper = lane & (2 * Kept);
#pragma unroll
  for (int j = 0; j < Kept; ++j) {
    const float given = upper ? sum[j] : sum[j + Kept], own = upper ? sum[j + Kept] : sum[j];
    sum[j] = own + __shfl_xor_sync(all_lanes, given, 2 * Kept);
  }
}
/// Σ over the warp's 16 rows of its 16 columns of this thread, of which it keeps 8 (lane / 4) + 2 (lane % 4) + {0, 1}.
__device__ __forceinline__ float2 column_sums(float (&sum)[16], int lane) {
  add_half<8>(sum, lane);
  add_half<4>(sum, lane);
  add_half<2>(sum, lane);
  return make_float2(sum[0], sum[1]);
}

/// From dmᵀ: dGᵀ is added, E summed, and `mixed` becomes the decayed scores as a left operand.
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
          const float gradient = dm[at] * decay[i] * step[half];
          dg[at] += gradient;
          rows[half] += gradient * g[at];
          columns[2 * j + i] += gradient * g[at];
          decay[i] *= g[at];
        }
        mixed[2 * j + half] = pack_bf16(decay[0], decay[1]);
      }
    }
  }
  const float upper = quad_sum(rows[0]), lower = quad_sum(rows[1]);
  if (own.column == 0) parts.e_columns[own.row] = upper, parts.e_columns[own.row + 8] = lower;
  const float2 sums = column_sums(columns, own.lane);
  const int column = own.lane / 4 * 8 + own.column;
  *reinterpret_cast<float2*>(&parts.e_rows[own.warp][column]) = sums;
}

template <int N>
__device__ __forceinline__ void compute_pairs(const Problem& problem, const Work& work, Shared<N>& shared) {
  const mimo_ssd_backward_args& args = problem.args;
  const SsdPlace own = own_place();
  const int count = static_cast<int>(work.piece.count);
  float g[32], dg[32] = {};
  wait(&shared.operands, 0);
  begin_products();
  queue_product<N / 16, false, false>(g, shared.b[0], shared.c[0], false);
  commit_products();
  wait_products<0>();
  settle(g);
  for (int i = 0; i < work.heads; ++i) {
    const int slot = i % stages, head = work.first_head + i;
    const typename Shared<N>::Stage& stage = shared.stage[slot];
    const SsdChunkTokens& tokens = shared.tokens[slot];
    Parts& parts = shared.parts[i % 2];
    char* const dx = shared.dx[i % 2];
    const float d = args.d[head];
    wait(&shared.full[slot], i / stages & 1);
    float dm[32], w[32];
    begin_products();
    queue_product<4, false, false>(dm, stage.x, stage.dy, false);
    commit_products();
    queue_product<N / 16, false, false>(w, shared.b[0], stage.dstate[0], false);
    commit_products();
    wait(&shared.parts_empty[i % 2], (i / 2 & 1) ^ 1);
    wait_products<1>();
    settle(dm);
    uint32_t mixed[16];
    differentiate_scores(dm, g, dg, tokens, own, parts, mixed);
    const float to_end[2] = {tokens.to_end[own.row], tokens.to_end[own.row + 8]};
    const float step[2] = {tokens.step[own.row], tokens.step[own.row + 8]};
    wait_products<0>();
    settle(w);
    // w: through the state after the chunk, then inside.
    uint32_t x[16];
    float b_dot[2] = {0, 0}, x_dot[2] = {0, 0}, d_sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * j + 2 * half;
        const uint32_t pair = x[2 * j + half] = pair_of(stage.x, own, j, half);
        w[at] *= to_end[half], w[at + 1] *= to_end[half];
        b_dot[half] += w[at] * lower_bf16(pair) + w[at + 1] * upper_bf16(pair);
      }
    }
    begin_products();
    queue_product(w, mixed, stage.dy);
    commit_products();
    b_dot[0] = quad_sum(b_dot[0]), b_dot[1] = quad_sum(b_dot[1]);
    wait_products<0>();
    settle(w);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * j + 2 * half;
        const uint32_t gradient = pair_of(stage.dy, own, j, half), pair = x[2 * j + half];
        x_dot[half] += w[at] * lower_bf16(pair) + w[at + 1] * upper_bf16(pair);
        d_sum += lower_bf16(gradient) * lower_bf16(pair) + upper_bf16(gradient) * upper_bf16(pair);
        pair_of(dx, own, j, half) =
            pack_bf16(step[half] * w[at] + d * lower_bf16(gradient), step[half] * w[at + 1] + d * upper_bf16(gradient));
      }
    }
    arrive_warp(&shared.empty[slot]);
    x_dot[0] = quad_sum(x_dot[0]), x_dot[1] = quad_sum(x_dot[1]);
    d_sum = warp_sum(d_sum);
    if (own.column == 0) {
      parts.b_dot[own.row] = b_dot[0], parts.b_dot[own.row + 8] = b_dot[1];
      parts.x_dot[own.row] = x_dot[0], parts.x_dot[own.row + 8] = x_dot[1];
    }
    if (own.lane == 0) parts.d[own.warp] = d_sum;
    arrive_warp(&shared.parts_full[i % 2]);
    meet<1, 128>();
    copy_rows(dx, count, static_cast<bf16*>(args.dx) + work.piece.begin * args.dxbc_stride + head * ssd_head,
              args.dxbc_stride);
  }
  store_tile(shared.dg, own, dg);
  publish_stores();
  meet<2, 256>();
}

// ---- the third -------------------------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void compute_states(const Problem& problem, const Work& work, Shared<N>& shared) {
  constexpr int slices = N / 64;
  const mimo_ssd_backward_args& args = problem.args;
  const SsdPlace own = own_place();
  float db[slices][32] = {}, dc[slices][32] = {};
  wait(&shared.operands, 0);
  for (int i = 0; i < work.heads; ++i) {
    const int slot = i % stages;
    const typename Shared<N>::Stage& stage = shared.stage[slot];
    const SsdChunkTokens& tokens = shared.tokens[slot];
    wait(&shared.full[slot], i / stages & 1);
    float b_part[32], c_part[32], dots[2] = {0, 0};
    begin_products();
    queue_product<4, false, true>(b_part, stage.x, stage.dstate[0], false);
    commit_products();
    queue_product<4, false, true>(c_part, stage.dy, stage.state[0], false);
    commit_products();
    const float weight[2] = {tokens.weight[own.row], tokens.weight[own.row + 8]};
    const float from_start[2] = {tokens.from_start[own.row], tokens.from_start[own.row + 8]};
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
          const uint32_t pair = pair_of(shared.c[slice], own, j, half);
          const float first = from_start[half] * c_part[at], second = from_start[half] * c_part[at + 1];
          dots[half] += first * lower_bf16(pair) + second * upper_bf16(pair);
          dc[slice][at] += first, dc[slice][at + 1] += second;
        }
      }
      if (slice + 1 < slices) {
        begin_products();
        queue_product<4, false, true>(c_part, stage.dy, stage.state[slice + 1], false);
        commit_products();
      }
    }
    arrive_warp(&shared.empty[slot]);
    dots[0] = quad_sum(dots[0]), dots[1] = quad_sum(dots[1]);
    wait(&shared.parts_empty[i % 2], (i / 2 & 1) ^ 1);
    Parts& parts = shared.parts[i % 2];
    if (own.column == 0) parts.c_dot[own.row] = dots[0], parts.c_dot[own.row + 8] = dots[1];
    arrive_warp(&shared.parts_full[i % 2]);
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
  const int64_t to = work.piece.begin * args.dxbc_stride + work.group * N + own.column;
#pragma unroll
  for (int slice = 0; slice < slices; ++slice) {
    settle(db[slice]);
    settle(dc[slice]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own.row + 8 * half;
      if (row >= work.piece.count) continue;
      const int64_t at = to + row * args.dxbc_stride + slice * 64;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int i = 4 * j + 2 * half;
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(args.db) + at + 8 * j) = pack_bf16(db[slice][i], db[slice][i + 1]);
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(args.dc) + at + 8 * j) = pack_bf16(dc[slice][i], dc[slice][i + 1]);
      }
    }
  }
}

// ---- kernels ---------------------------------------------------------------------------------------------------

template <int N>
__global__ void __launch_bounds__(threads, 1) backward_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  Shared<N>& shared = *reinterpret_cast<Shared<N>*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  const mimo_ssd_backward_args& args = problem.args;
  const int groups = static_cast<int>(args.groups);
  Work work;
  work.number = blockIdx.x / groups, work.group = blockIdx.x % groups;
  work.heads = static_cast<int>(args.heads) / groups, work.first_head = work.group * work.heads;
  work.piece = piece_at(args.cu_seqlens, args.sequences, ssd_chunk, work.number);
  if (work.piece.count == 0) return;
  if (threadIdx.x == 0) {
    initialise(&shared.operands, 1);
    for (int i = 0; i < stages; ++i) initialise(&shared.full[i], 1), initialise(&shared.empty[i], 8 + dot_warps);
    for (int i = 0; i < 2; ++i) initialise(&shared.parts_full[i], 8 + dot_warps), initialise(&shared.parts_empty[i], 1);
    publish_barriers();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    shrink_registers<service_registers>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
      fetch(problem, work, shared);
    } else if (warp == 1 || warp == 2) {
      multiply_states(work, shared, warp - 1);
    } else if (warp == 3) {
      finish_steps(problem, work, shared);
    }
  } else if (warpgroup == 1) {
    grow_registers<pair_registers>();
    compute_pairs(problem, work, shared);
  } else {
    grow_registers<state_registers>();
    compute_states(problem, work, shared);
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
  problem.args = args;
  problem.states = state_space.as<bf16>();
  problem.dstates = problem.states + state_elements;
  problem.tokens = tokens;
  problem.sums = sum_space.as<SsdHeadSums>();
  sm90_bf16_ssd_tokens(stream, args, tokens);
  sm80_bf16_ssd_gate(stream, args, dy_space.as<bf16>());
  const SsdSizes sizes{args.cu_seqlens, args.sequences, args.tokens, args.heads, args.groups, args.state_dim};
  const SsdCarry carries[2] = {{problem.x, problem.b, state_space.as<bf16>(), nullptr, false},
                               {problem.dy, problem.c, state_space.as<bf16>() + state_elements, nullptr, true}};
  sm90_bf16_ssd_states(stream, sizes, tokens, carries, 2);
  const auto run = [&](auto n) {
    launch(stream, backward_kernel<n>, grid_of(pieces * args.groups), dim3(threads), 1024 + sizeof(Shared<n>), problem);
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
