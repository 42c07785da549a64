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

/// Issues sum = left right over k = the columns of a head, as a group: the first 64, then the tail's.
template <int Tail, bool right_rows>
__device__ __forceinline__ void queue_head_product(float (&sum)[32], const char* left, const char* right, const char* tail_left,
                                                   const char* tail_right) {
  queue_product<4, false, right_rows>(sum, left, right, false);
  if constexpr (Tail > 0) queue_product<Tail / 16, false, right_rows>(sum, tail_left, tail_right, true);
  commit_products();
}

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
template <int Sums>
__device__ __forceinline__ float diagonal(const float (&sum)[Sums], const SsdPlace& own) {
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < Sums / 8; ++warp) {
    if (warp == own.warp) total = own.lane & 4 ? sum[8 * warp + 1] + sum[8 * warp + 7] : sum[8 * warp] + sum[8 * warp + 6];
  }
  return total;
}
__device__ __forceinline__ void put_diagonal(float total, const SsdPlace& own, float (&to)[32]) {
  if (own.lane / 8 == own.lane % 4) to[own.warp * 8 + own.lane / 4] = total;
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

/// What the parts of a head share: the decayed scores, factors of this thread's two tokens, and sums over the parts.
struct PairsOfHead {
  uint32_t mixed[16];
  float to_end[2], step[2], d;
  float b_dot[2], states;
};

/// w and dx of a head's columns from `First` on, the `part`-th part of the block; `w` holds B dS_cᵀ and is overwritten.
template <int N, int Tail, int First>
__device__ __forceinline__ void compute_pairs_of_part(const Problem& problem, const Work& work, int head, int part, const SsdPlace& own,
                                                      Shared<N, Tail>& shared, Parts& parts,
                                                      float (&w)[(First == 0 ? ssd_head : Tail) / 2], PairsOfHead& of_head) {
  constexpr int columns = First == 0 ? ssd_head : Tail;
  constexpr bool last = First > 0 || Tail == 0;
  const int slot = part % shared.stages;
  const auto& stage = shared.template stage<Stage<N, columns>>(slot);
  char* const dx = shared.dx[part % 2];
  const bool writes = threadIdx.x % 128 == 0;
  // w_j: the term through the state after the chunk, then the term within the chunk.
#pragma unroll
  for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * j + 2 * half;
      const uint32_t x = pair_of(stage.x, own, j, half);
      w[at] *= of_head.to_end[half], w[at + 1] *= of_head.to_end[half];
      of_head.b_dot[half] += w[at] * lower_bf16(x) + w[at + 1] * upper_bf16(x);
    }
  }
  begin_products();
  queue_product(w, of_head.mixed, stage.dy);
  commit_products();
  if (last) {
    const float upper = quad_sum(of_head.b_dot[0]), lower = quad_sum(of_head.b_dot[1]);
    if (own.column == 0) parts.b_dot[own.row] = upper, parts.b_dot[own.row + 8] = lower;
  }
  uint32_t dy[columns / 4];  // loaded in full before dx is written: the compiler cannot tell that dx does not alias it
#pragma unroll
  for (int j = 0; j < columns / 4; ++j) dy[j] = pair_of(stage.dy, own, j / 2, j % 2);
  wait_products<0>();
  settle(w);
#pragma unroll
  for (int j = 0; j < columns / 4; ++j) {
    const float step = of_head.step[j % 2], d = of_head.d;
    pair_of(dx, own, j / 2, j % 2) = pack_bf16(step * w[2 * j] + d * lower_bf16(dy[j]), step * w[2 * j + 1] + d * upper_bf16(dy[j]));
  }
  // ⟨H_c, dS_c⟩ is the trace of H_c dS_cᵀ. Of a tail of 16 only the first 16 rows of the product are its own.
  begin_products();
  queue_product<N / 16, false, false, columns>(w, stage.state[0], stage.dstate[0], false);
  commit_products();
  publish_stores();
  if (writes) wait_read<0>();  // the other dx buffer is free
  meet<1, 128>();
  if (writes) write_head_tile(dx, problem.dx, head, work.row, work.first, work.last, First);
  wait_products<0>();
  settle(w);
  if (First == 0) {
    of_head.states = diagonal(w, own);
  } else {
    of_head.states += diagonal(w, own);
  }
  if (last) put_diagonal(of_head.states, own, parts.states);
  arrive_warp(&shared.empty[slot]);
}

template <int N, int Tail>
__device__ __forceinline__ void compute_pairs(const Problem& problem, Shared<N, Tail>& shared) {
  constexpr int stages = Shared<N, Tail>::stages, tail_sums = Tail == 0 ? 1 : Tail / 2;
  const SsdPlace own = own_place();
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
      const int part = ssd_parts<Tail> * step_number, head = work.group * problem.heads + i;
      const auto& stage = shared.template stage<typename Shared<N, Tail>::Whole>(part % stages);
      const auto& tail = shared.template stage<typename Shared<N, Tail>::OfTail>((part + 1) % stages);
      const SsdChunkTokens& tokens = shared.tokens[part % stages];
      Parts& parts = shared.parts[step_number % 2];
      PairsOfHead of_head;
      of_head.d = problem.args.d[head];
      shared.wait_full(part);
      if constexpr (Tail > 0) shared.wait_full(part + 1);
      float dm[32], w[32], w_tail[tail_sums];
      begin_products();
      queue_head_product<Tail, false>(dm, stage.x, stage.dy, tail.x, tail.dy);
      queue_product<N / 16, false, false>(w, shared.b[0], stage.dstate[0], false);
      if constexpr (Tail > 0) queue_product<N / 16, false, false>(w_tail, shared.b[0], tail.dstate[0], false);
      commit_products();
      wait(&shared.parts_empty[step_number % 2], (step_number / 2 & 1) ^ 1);
      wait_products<1>();
      settle(dm);
      put_diagonal(diagonal(dm, own), own, parts.d);
      differentiate_scores(dm, g, dg, tokens, own, parts, of_head.mixed);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        of_head.to_end[half] = tokens.to_end[own.row + 8 * half], of_head.step[half] = tokens.step[own.row + 8 * half];
        of_head.b_dot[half] = 0;
      }
      wait_products<0>();
      settle(w);
      if constexpr (Tail > 0) settle(w_tail);
      compute_pairs_of_part<N, Tail, 0>(problem, work, head, part, own, shared, parts, w, of_head);
      if constexpr (Tail > 0) {
        compute_pairs_of_part<N, Tail, ssd_head>(problem, work, head, part + 1, own, shared, parts, w_tail, of_head);
      }
      arrive_warp(&shared.parts_full[step_number % 2]);
    }
    uint32_t packed[16];
    pack_tile(dg, packed);
    store_tile(shared.dg, own, packed);
    publish_stores();
    meet<2, 256>();
  }
  if (threadIdx.x % 128 == 0) wait_read<0>();
}

// ---- third warpgroup: states, dB, dC ---------------------------------------------------------------------------

/// Adds a head's b_j to dB and c_i to dC, and writes C_i · c_i; `part` is the head's first.
template <int N, int Tail>
__device__ __forceinline__ void add_head(Shared<N, Tail>& shared, int part, const SsdPlace& own, float (&db)[N / 64][32],
                                         float (&dc)[N / 64][32], float (&dots)[2]) {
  constexpr int slices = N / 64, stages = Shared<N, Tail>::stages;
  const auto& stage = shared.template stage<typename Shared<N, Tail>::Whole>(part % stages);
  const auto& tail = shared.template stage<typename Shared<N, Tail>::OfTail>((part + 1) % stages);
  const SsdChunkTokens& tokens = shared.tokens[part % stages];
  float b_part[32], c_part[32];
  begin_products();
  queue_head_product<Tail, true>(b_part, stage.x, stage.dstate[0], tail.x, tail.dstate[0]);
  queue_head_product<Tail, true>(c_part, stage.dy, stage.state[0], tail.dy, tail.state[0]);
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
      queue_head_product<Tail, true>(b_part, stage.x, stage.dstate[slice + 1], tail.x, tail.dstate[slice + 1]);
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
      queue_head_product<Tail, true>(c_part, stage.dy, stage.state[slice + 1], tail.dy, tail.state[slice + 1]);
    }
  }
  dots[0] = from_start[0] * quad_sum(dots[0]), dots[1] = from_start[1] * quad_sum(dots[1]);
}

template <int N, int Tail>
__device__ __forceinline__ void compute_states(const Problem& problem, Shared<N, Tail>& shared) {
  constexpr int slices = N / 64, stages = Shared<N, Tail>::stages;
  const SsdPlace own = own_place();
  for (int k = 0, step_number = 0;; ++k) {
    wait(&shared.operands_full, k & 1);
    const Work work = shared.work;
    if (work.count == 0) break;
    float db[slices][32] = {}, dc[slices][32] = {};
    for (int i = 0; i < problem.heads; ++i, ++step_number) {
      const int part = ssd_parts<Tail> * step_number;
      shared.wait_full(part);
      if constexpr (Tail > 0) shared.wait_full(part + 1);
      float dots[2];
      add_head(shared, part, own, db, dc, dots);
      arrive_warp(&shared.empty[part % stages]);
      if constexpr (Tail > 0) arrive_warp(&shared.empty[(part + 1) % stages]);
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

template <int N, int Tail>
__global__ void __launch_bounds__(threads, 1) backward_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  using Memory = Shared<N, Tail>;
  Memory& shared = *reinterpret_cast<Memory*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  if (threadIdx.x == 0) {
    initialise(&shared.operands_full, 1), initialise(&shared.operands_empty, 5);
    for (int i = 0; i < Memory::stages; ++i) initialise(&shared.full[i], 1), initialise(&shared.empty[i], 8);
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
  const int64_t width = args.heads * args.head_dim;
  const SsdSizes sizes{args.cu_seqlens, args.sequences, args.tokens, args.heads, args.head_dim, args.groups, args.state_dim};
  Workspace token_space(&stream, pieces * args.heads * static_cast<int64_t>(sizeof(SsdChunkTokens)));
  Workspace dy_space(&stream, args.tokens * width * 2);
  Workspace sum_space(&stream, pieces * args.heads * static_cast<int64_t>(sizeof(SsdHeadSums)));
  SsdChunkTokens* const tokens = token_space.as<SsdChunkTokens>();
  sm90_bf16_ssd_tokens(stream, args, tokens);
  sm80_bf16_ssd_gate(stream, args, dy_space.as<bf16>());
  with_sizes(args.state_dim, args.head_dim, [&](auto n, auto tail) {
    const int64_t state_elements = pieces * args.heads * slices * ssd_state_elements<tail>;
    Workspace state_space(&stream, 2 * state_elements * 2);
    const auto of_heads = [&](const void* data, int64_t stride) {
      return heads_map(data, args.heads, args.head_dim, args.head_dim, stride, ssd_chunk);
    };
    const auto of_groups = [&](const void* data, int64_t stride) {
      return heads_map(data, args.groups * slices, 64, 64, stride, ssd_chunk);
    };
    Problem problem;
    problem.x = of_heads(args.x, args.xbc_stride);
    problem.b = of_groups(args.b, args.xbc_stride);
    problem.c = of_groups(args.c, args.xbc_stride);
    problem.dy = of_heads(dy_space.as<bf16>(), width);
    problem.dx = of_heads(args.dx, args.dxbc_stride);
    problem.db = of_groups(args.db, args.dxbc_stride);
    problem.dc = of_groups(args.dc, args.dxbc_stride);
    problem.args = args;
    problem.states = state_space.as<bf16>();
    problem.dstates = problem.states + state_elements;
    problem.tokens = tokens;
    problem.sums = sum_space.as<SsdHeadSums>();
    problem.heads = static_cast<int>(args.heads / args.groups);
    problem.units = static_cast<int>(pieces * args.groups);
    const SsdCarry carries[2] = {{problem.x, problem.b, state_space.as<bf16>(), nullptr, false},
                                 {problem.dy, problem.c, state_space.as<bf16>() + state_elements, nullptr, true}};
    sm90_bf16_ssd_states(stream, sizes, tokens, carries, 2);
    launch(stream, backward_kernel<n, tail>, grid_of(smaller(problem.units, stream.device->multiprocessors)), dim3(threads),
           1024 + sizeof(Shared<n, tail>), problem);
  });
  ssd_add_head_sums(stream, sum_space.as<SsdHeadSums>(), args.cu_seqlens, args.sequences, pieces, args.heads, ssd_chunk,
                    args.dd, args.da_log, args.ddt_bias);
}

}  // namespace mimo::cuda
