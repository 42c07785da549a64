// Chunk-scan (SSD) backward on Hopper: shared memory layout and the service warps, which load operands and compute the
// gradients of dt and A (docs/spec/language-model.md §2.4).
#pragma once
#include "sm90_ssd.cuh"
#include "ssd.h"

namespace mimo::cuda::sm90::ssd_backward {

/// Sums over a head's chunk.
struct Parts {
  float e_rows[4][ssd_chunk];  // Σ_j E_ij, partial sums over 16 j each
  float inside[ssd_chunk];     // Σ_i E_ij / Δ_j = x_j · Σ_i G_ij L_ij dy_i
  float b_dot[ssd_chunk];      // x_j · exp(cs_Q - cs_j) dS_c B_j
  float c_dot[ssd_chunk];      // C_i · c_i
  float d[32], states[32];     // addends of Σ_i dy_i · x_i and ⟨H_c, dS_c⟩
};

/// A work item: a chunk and a group; count 0: no more work.
struct Work {
  int number, group, begin, count, first, last, row;
};

/// Operands of a part of a head, of `Columns` columns.
template <int N, int Columns>
struct Stage {
  char state[N / 64][Columns * tile_row_bytes], dstate[N / 64][Columns * tile_row_bytes];
  char x[ssd_tile_bytes], dy[ssd_tile_bytes];
};

/// A ring of stages holds the heads' parts in turn. Heads with a tail of 16 take two stages of different size each; two
/// such heads fit, and three whole parts.
template <int N, int Tail>
struct Shared {
  static constexpr int slices = N / 64, stages = Tail == 16 ? 4 : 3;
  using Whole = Stage<N, ssd_head>;
  using OfTail = Stage<N, Tail == 16 ? 16 : ssd_head>;
  static constexpr int ring_bytes = Tail == 16 ? 2 * (sizeof(Whole) + sizeof(OfTail)) : 3 * sizeof(Whole);
  char b[slices][ssd_tile_bytes], c[slices][ssd_tile_bytes];  // reused for dB and dC
  char ring[ring_bytes];
  char dx[2][ssd_tile_bytes];
  char dg[ssd_tile_bytes];  // [j][i]
  SsdChunkTokens tokens[stages];
  Parts parts[2];
  Work work;
  uint64_t operands_full, operands_empty, full[stages], empty[stages], parts_full[2], parts_empty[2];

  /// The stage at a slot of the ring: Whole, or OfTail.
  template <class Type>
  __device__ __forceinline__ Type& stage(int slot) {
    constexpr int whole = sizeof(Whole);
    return *reinterpret_cast<Type*>(ring + (Tail == 16 ? slot / 2 * (ring_bytes / 2) + slot % 2 * whole : slot * whole));
  }
  /// Waits until the stage of a part is full. Parts count from the block's first.
  __device__ __forceinline__ void wait_full(int part) { wait(&full[part % stages], part / stages & 1); }
};

struct Problem {
  CUtensorMap x, b, c, dy, dx, db, dc;
  mimo_ssd_backward_args args;
  const bf16* states;
  const bf16* dstates;
  const SsdChunkTokens* tokens;
  SsdHeadSums* sums;
  int heads, units;  // heads of a group; chunks x groups
};

/// Returns the block's next non-empty work item from `unit` on, and advances `unit` past it.
__device__ __forceinline__ Work next_work(const Problem& problem, int& unit) {
  const mimo_ssd_backward_args& args = problem.args;
  const int groups = static_cast<int>(args.groups);
  while (unit < problem.units) {
    const int number = unit / groups, group = unit % groups;
    unit += gridDim.x;
    const Piece piece = piece_at(args.cu_seqlens, args.sequences, ssd_chunk, number);
    if (piece.count == 0) continue;
    return {number,
            group,
            static_cast<int>(piece.begin),
            static_cast<int>(piece.count),
            static_cast<int>(piece.first),
            static_cast<int>(piece.last),
            static_cast<int>(piece.index) * ssd_chunk};
  }
  return {};
}

/// Loads B and C of the block's chunks and publishes the work items to the other warps.
template <int N, int Tail>
__device__ __forceinline__ void fetch_operands(const Problem& problem, Shared<N, Tail>& shared) {
  constexpr int slices = N / 64;
  int unit = blockIdx.x;
  for (int k = 0;; ++k) {
    const Work work = next_work(problem, unit);
    wait(&shared.operands_empty, (k & 1) ^ 1);
    shared.work = work;
    if (work.count == 0) {
      arrive(&shared.operands_full);
      return;
    }
    arrive_expecting(&shared.operands_full, 2 * slices * ssd_tile_bytes);
    for (int i = 0; i < slices; ++i) {
      copy_head_box(shared.b[i], problem.b, 0, work.group * slices + i, work.row, work.first, work.last, &shared.operands_full);
      copy_head_box(shared.c[i], problem.c, 0, work.group * slices + i, work.row, work.first, work.last, &shared.operands_full);
    }
  }
}

/// Loads x, dy and states of a head's columns from `First` on, the `part`-th part of the block.
template <int N, int Tail, int First>
__device__ __forceinline__ void fetch_part(const Problem& problem, const Work& work, int head, int part, Shared<N, Tail>& shared) {
  constexpr int slices = N / 64, columns = First == 0 ? ssd_head : Tail, stages = Shared<N, Tail>::stages;
  constexpr uint32_t state_bytes = slices * columns * tile_row_bytes;
  const int slot = part % stages;
  auto& stage = shared.template stage<Stage<N, columns>>(slot);
  uint64_t* const full = &shared.full[slot];
  wait(&shared.empty[slot], (part / stages & 1) ^ 1);
  arrive_expecting(full, sizeof(stage) + (First == 0 ? sizeof(SsdChunkTokens) : 0));
  const int64_t at = work.number * problem.args.heads + head;
  const int64_t states_at = (at * ssd_state_elements<Tail> + First * 64) * slices;
  copy_head_box(stage.x, problem.x, First, head, work.row, work.first, work.last, full);
  copy_head_box(stage.dy, problem.dy, First, head, work.row, work.first, work.last, full);
  if (First == 0) copy_bytes(&shared.tokens[slot], problem.tokens + at, sizeof(SsdChunkTokens), full);
  copy_bytes(stage.dstate, problem.dstates + states_at, state_bytes, full);
  copy_bytes(stage.state, problem.states + states_at, state_bytes, full);
}

/// Loads every head, also of a next chunk whose B and C have no free buffer yet.
template <int N, int Tail>
__device__ __forceinline__ void fetch_heads(const Problem& problem, Shared<N, Tail>& shared) {
  int unit = blockIdx.x, step = 0;
  while (true) {
    const Work work = next_work(problem, unit);
    if (work.count == 0) return;
    for (int i = 0; i < problem.heads; ++i, ++step) {
      const int head = work.group * problem.heads + i;
      fetch_part<N, Tail, 0>(problem, work, head, ssd_parts<Tail> * step, shared);
      if constexpr (Tail > 0) fetch_part<N, Tail, ssd_head>(problem, work, head, 2 * step + 1, shared);
    }
  }
}

/// Computes the gradients of dt and A for a head's chunk; one warp, lane l handles tokens 2 l and 2 l + 1.
__device__ __forceinline__ void finish_head(const Problem& problem, const Work& work, int head, const Parts& parts, int step_number,
                                            uint64_t* parts_full, uint64_t* parts_empty) {
  const mimo_ssd_backward_args& args = problem.args;
  const int lane = threadIdx.x % 32;
  const SsdChunkTokens& tokens = problem.tokens[work.number * args.heads + head];
  const float2 steps = pair_at(tokens.step, 2 * lane);
  const float step[2] = {steps.x, steps.y}, decay = tokens.from_start[ssd_chunk - 1];
  const float a = -expf(args.a_log[head]), bias = args.dt_bias[head];
  float dt[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int64_t token = work.begin + min(2 * lane + j, work.count - 1);
    dt[j] = load(static_cast<const bf16*>(args.dt) + token * args.dt_stride + head);
  }
  wait(parts_full, step_number / 2 & 1);
  float inside[2], before[2], explicit_part[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int t = 2 * lane + j;
    inside[j] = parts.c_dot[t] - step[j] * parts.inside[t];
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) inside[j] += parts.e_rows[warp][t];
    before[j] = step[j] * parts.b_dot[t];
    explicit_part[j] = parts.b_dot[t] + parts.inside[t];
  }
  float d_sum = parts.d[lane], states = parts.states[lane];
  arrive_warp(parts_empty);
  d_sum = warp_sum(d_sum);
  const float carried = decay * warp_sum(states);
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
  float a_log = 0, dt_bias = 0;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int t = 2 * lane + j;
    if (t >= work.count) continue;
    const float slope = step[j] <= args.dt_minimum ? 0.0f : sigmoid(dt[j] + bias);
    const float gradient = (explicit_part[j] + a * da[j]) * slope;
    store(static_cast<bf16*>(args.ddt) + (work.begin + t) * args.ddt_stride + head, gradient);
    a_log += a * da[j] * step[j];
    dt_bias += gradient;
  }
  a_log = warp_sum(a_log);
  dt_bias = warp_sum(dt_bias);
  if (lane == 0) problem.sums[work.number * args.heads + head] = SsdHeadSums{d_sum, a_log, dt_bias};
}

template <int N, int Tail>
__device__ __forceinline__ void finish_steps(const Problem& problem, Shared<N, Tail>& shared) {
  for (int k = 0, step = 0;; ++k) {
    wait(&shared.operands_full, k & 1);
    const Work work = shared.work;
    if (work.count == 0) return;
    arrive_warp(&shared.operands_empty);
    for (int i = 0; i < problem.heads; ++i, ++step) {
      finish_head(problem, work, work.group * problem.heads + i, shared.parts[step % 2], step, &shared.parts_full[step % 2],
                  &shared.parts_empty[step % 2]);
    }
  }
}

}  // namespace mimo::cuda::sm90::ssd_backward
