// What the scan's backward on Hopper shares between warps, and the warps that serve: the copies of a head's operands, the
// product of its states, and the gradients of its steps (docs/spec/language-model.md §2.4).
#pragma once
#include "sm90_ssd.cuh"
#include "ssd.h"

namespace mimo::cuda::sm90::ssd_backward {

constexpr int stages = 3;
constexpr int dot_warps = 2;  // multiply the states

/// Sums over a head's chunk.
struct Parts {
  float e_rows[4][ssd_chunk];  // of 16 j each
  float e_columns[ssd_chunk], x_dot[ssd_chunk], b_dot[ssd_chunk], c_dot[ssd_chunk];
  float d[4], states[dot_warps];
};

template <int N>
struct Shared {
  static constexpr int slices = N / 64;
  struct Stage {
    char state[slices][ssd_tile_bytes], dstate[slices][ssd_tile_bytes];
    char x[ssd_tile_bytes], dy[ssd_tile_bytes];
  };
  char b[slices][ssd_tile_bytes], c[slices][ssd_tile_bytes];
  Stage stage[stages];
  char dx[2][ssd_tile_bytes];
  char dg[ssd_tile_bytes];  // [j][i]
  SsdChunkTokens tokens[stages];
  Parts parts[2];
  uint64_t operands, full[stages], empty[stages], parts_full[2], parts_empty[2];
};

struct Problem {
  CUtensorMap x, b, c, dy;
  mimo_ssd_backward_args args;
  const bf16* states;
  const bf16* dstates;
  const SsdChunkTokens* tokens;
  SsdHeadSums* sums;
};

struct Work {
  int64_t number;  // of the chunk
  int first_head, heads, group;
  Piece piece;
};

template <int N>
__device__ __forceinline__ void fetch(const Problem& problem, const Work& work, Shared<N>& shared) {
  constexpr int slices = N / 64;
  const int first = static_cast<int>(work.piece.first), last = static_cast<int>(work.piece.last);
  const int row = static_cast<int>(work.piece.index) * ssd_chunk;
  arrive_expecting(&shared.operands, 2 * slices * ssd_tile_bytes);
  for (int i = 0; i < slices; ++i) {
    copy_head_box(shared.b[i], problem.b, 0, work.group * slices + i, row, first, last, &shared.operands);
    copy_head_box(shared.c[i], problem.c, 0, work.group * slices + i, row, first, last, &shared.operands);
  }
  for (int i = 0; i < work.heads; ++i) {
    const int slot = i % stages, head = work.first_head + i;
    uint64_t* const full = &shared.full[slot];
    wait(&shared.empty[slot], (i / stages & 1) ^ 1);
    arrive_expecting(full, sizeof(typename Shared<N>::Stage) + sizeof(SsdChunkTokens));
    const int64_t at = work.number * problem.args.heads + head;
    copy_head_box(shared.stage[slot].x, problem.x, 0, head, row, first, last, full);
    copy_head_box(shared.stage[slot].dy, problem.dy, 0, head, row, first, last, full);
    copy_bytes(&shared.tokens[slot], problem.tokens + at, sizeof(SsdChunkTokens), full);
    copy_bytes(shared.stage[slot].dstate, problem.dstates + at * slices * ssd_tile_elements, slices * ssd_tile_bytes, full);
    copy_bytes(shared.stage[slot].state, problem.states + at * slices * ssd_tile_elements, slices * ssd_tile_bytes, full);
  }
}

/// ⟨H_c, dS_c⟩, a part by each of two warps.
template <int N>
__device__ __forceinline__ void multiply_states(const Work& work, Shared<N>& shared, int own) {
  constexpr int pieces = N / 64 * ssd_tile_bytes / 16;
  for (int i = 0; i < work.heads; ++i) {
    const int slot = i % stages;
    wait(&shared.full[slot], i / stages & 1);
    const uint4* const state = reinterpret_cast<const uint4*>(shared.stage[slot].state);
    const uint4* const dstate = reinterpret_cast<const uint4*>(shared.stage[slot].dstate);
    float sum[2] = {0, 0};
#pragma unroll 2
    for (int at = own * 32 + threadIdx.x % 32; at < pieces; at += 32 * dot_warps) {
      const uint4 h = state[at], s = dstate[at];
      sum[0] += lower_bf16(h.x) * lower_bf16(s.x), sum[1] += upper_bf16(h.x) * upper_bf16(s.x);
      sum[0] += lower_bf16(h.y) * lower_bf16(s.y), sum[1] += upper_bf16(h.y) * upper_bf16(s.y);
      sum[0] += lower_bf16(h.z) * lower_bf16(s.z), sum[1] += upper_bf16(h.z) * upper_bf16(s.z);
      sum[0] += lower_bf16(h.w) * lower_bf16(s.w), sum[1] += upper_bf16(h.w) * upper_bf16(s.w);
    }
    arrive_warp(&shared.empty[slot]);
    const float total = warp_sum(sum[0] + sum[1]);
    wait(&shared.parts_empty[i % 2], (i / 2 & 1) ^ 1);
    if (threadIdx.x % 32 == 0) shared.parts[i % 2].states[own] = total;
    arrive_warp(&shared.parts_full[i % 2]);
  }
}

/// The gradients of the heads' steps, by one warp: lane l has tokens 2 l and 2 l + 1.
template <int N>
__device__ __forceinline__ void finish_steps(const Problem& problem, const Work& work, Shared<N>& shared) {
  const mimo_ssd_backward_args& args = problem.args;
  const int lane = threadIdx.x % 32, count = static_cast<int>(work.piece.count);
  for (int i = 0; i < work.heads; ++i) {
    const int head = work.first_head + i;
    const SsdChunkTokens& tokens = problem.tokens[work.number * args.heads + head];
    const float2 steps = pair_at(tokens.step, 2 * lane);
    const float step[2] = {steps.x, steps.y}, decay = tokens.from_start[ssd_chunk - 1];
    const float a = -expf(args.a_log[head]), bias = args.dt_bias[head];
    float dt[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t token = work.piece.begin + min(2 * lane + j, count - 1);
      dt[j] = load(static_cast<const bf16*>(args.dt) + token * args.dt_stride + head);
    }
    const Parts& parts = shared.parts[i % 2];
    wait(&shared.parts_full[i % 2], i / 2 & 1);
    float inside[2], before[2], x_dot[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int t = 2 * lane + j;
      inside[j] = parts.c_dot[t] - parts.e_columns[t];
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) inside[j] += parts.e_rows[warp][t];
      before[j] = step[j] * parts.b_dot[t];
      x_dot[j] = parts.x_dot[t];
    }
    const float d_sum = parts.d[0] + parts.d[1] + parts.d[2] + parts.d[3];
    const float carried = decay * (parts.states[0] + parts.states[1]);
    arrive_warp(&shared.parts_empty[i % 2]);
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
      if (t >= count) continue;
      const float slope = step[j] <= args.dt_minimum ? 0.0f : sigmoid(dt[j] + bias);
      const float gradient = (x_dot[j] + a * da[j]) * slope;
      store(static_cast<bf16*>(args.ddt) + (work.piece.begin + t) * args.ddt_stride + head, gradient);
      a_log += a * da[j] * step[j];
      dt_bias += gradient;
    }
    a_log = warp_sum(a_log);
    dt_bias = warp_sum(dt_bias);
    if (lane == 0) problem.sums[work.number * args.heads + head] = SsdHeadSums{d_sum, a_log, dt_bias};
  }
}

}  // namespace mimo::cuda::sm90::ssd_backward
