// Shared by chunk-scan (SSD) forward and backward (docs/spec/language-model.md §2.3, §2.4): tasks, tiles in scratch
// memory, decays.
//
// A task is one sequence and a block of heads of one group. It processes the sequence in chunks counted from its first
// token, with the heads' states in scratch memory. A chunk's matrices (Q x Q, Q x N, Q x P) fit in the L2 cache.
// Products are slow if the right operand is transposed, so some tiles are kept in both orders and states as Hᵀ [N, P].
// C Bᵀ is computed once for a task's heads.
#pragma once
#include "gemm.h"
#include "kernel.h"
#include "prefetch.h"
#include "transpose.h"
#include "vectors.h"

namespace mimo::MIMO_ISA {

// Longer chunks cost more arithmetic (Q for each token and head); the result is the same.
constexpr int64_t ssd_longest_chunk = 64;
// Causal Q x Q products are computed in blocks of rows, each up to its last row's column.
constexpr int64_t ssd_row_block = 32;
// Rows of Q x Q tiles and per-token vectors are padded to whole vectors.
constexpr int64_t ssd_vector = 16;
constexpr int64_t ssd_heads_per_task = 8;

static inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/// Division into tasks: by sizes alone, so that sums do not depend on the number of threads.
struct SsdPlan {
  int64_t head_dim, state_dim;
  int64_t chunk;           // tokens of a chunk
  int64_t row_width;       // floats of a row of a Q x Q tile
  int64_t longest;         // tokens of the longest sequence
  int64_t heads_per_group;
  int64_t blocks_per_group;
  int64_t blocks;          // blocks of heads over all groups
  int64_t tasks;
};

struct SsdTask {
  int64_t sequence;
  int64_t first, last;  // tokens
  int64_t group;
  int64_t head, heads;
  int64_t block;  // index of the block within its group
};

template <class Args>
static inline SsdPlan ssd_plan(const Args& args) {
  SsdPlan plan{};
  plan.head_dim = args.head_dim;
  plan.state_dim = args.state_dim;
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int64_t length = args.cu_seqlens[s + 1] - args.cu_seqlens[s];
    if (length > plan.longest) plan.longest = length;
  }
  plan.chunk = smaller(args.chunk_size, ssd_longest_chunk);
  plan.row_width = round_up(plan.chunk, ssd_row_block);
  plan.heads_per_group = args.heads / args.groups;
  plan.blocks_per_group = (plan.heads_per_group + ssd_heads_per_task - 1) / ssd_heads_per_task;
  // A few sequences with few groups would leave cores idle; smaller blocks recompute B Cᵀ but share the rest.
  constexpr int64_t wanted_tasks = 4;
  while (plan.blocks_per_group < plan.heads_per_group &&
         args.tokens * args.groups * plan.blocks_per_group < wanted_tasks * plan.longest) {
    plan.blocks_per_group = smaller(plan.blocks_per_group * 2, plan.heads_per_group);
  }
  plan.blocks = args.groups * plan.blocks_per_group;
  plan.tasks = args.sequences * plan.blocks;
  return plan;
}

/// Task `index`, sequence-major: the tasks of a long sequence run concurrently.
template <class Args>
static inline SsdTask ssd_task(const Args& args, const SsdPlan& plan, int64_t index) {
  const int64_t sequence = index / plan.blocks, group = index % plan.blocks / plan.blocks_per_group;
  const int64_t block = index % plan.blocks_per_group;
  const int64_t begin = plan.heads_per_group * block / plan.blocks_per_group;
  const int64_t end = plan.heads_per_group * (block + 1) / plan.blocks_per_group;
  return SsdTask{sequence,
                 args.cu_seqlens[sequence],
                 args.cu_seqlens[sequence + 1],
                 group,
                 group * plan.heads_per_group + begin,
                 end - begin,
                 block};
}

/// Number of heads of the largest task.
static inline int64_t ssd_most_heads(const SsdPlan& plan) {
  return (plan.heads_per_group + plan.blocks_per_group - 1) / plan.blocks_per_group;
}

/// Allocates aligned pieces of scratch memory; without a base it only counts them.
struct SsdScratch {
  float* base;
  int64_t used = 0;
  float* take(int64_t floats) {
    float* piece = base == nullptr ? nullptr : base + used;
    used += round_up(floats, ssd_vector);
    return piece;
  }
};

/// Calls body(task, scratch) for every task; threads claim tasks dynamically, each with its own scratch memory.
template <class Body>
static inline void ssd_run_tasks(mimo_stream& stream, int64_t tasks, int64_t scratch_floats, Body&& body) {
  if (tasks <= 0) return;
  const int64_t slots = smaller(tasks, stream.device->threads.size());
  Workspace scratch(&stream, slots * scratch_floats * static_cast<int64_t>(sizeof(float)));
  int64_t next = 0;
  parallel_for(stream.device->threads, slots, [&](int64_t slot) {
    for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;) {
      body(task, scratch.as<float>() + slot * scratch_floats);
    }
  });
}

/// tile[r][i] = x[r * stride + i] in fp32.
template <class T>
static inline void load_tile(const T* x, int64_t stride, int64_t rows, int64_t width, float* tile) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * stride;
    float* to = tile + r * width;
    short_loop(width, [=](int64_t i) { to[i] = load(from[i]); });
  }
}

/// to[r][i] = factor[i] from[r][i].
static inline void scale_columns(const float* from, const float* factor, int64_t rows, int64_t width, float* to) {
  for (int64_t r = 0; r < rows; ++r) {
    short_loop(width, [=](int64_t i) { to[r * width + i] = factor[i] * from[r * width + i]; });
  }
}

/// to[r][i] = factor[r] from[r][i].
static inline void scale_rows(const float* from, const float* factor, int64_t rows, int64_t width, float* to,
                              int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    const float f = factor[r];
    short_loop(width, [=](int64_t i) { to[r * to_stride + i] = f * from[r * width + i]; });
  }
}

/// Calls body(factor of column k) with mask factors or with 1: a branch inside a loop would prevent vectorisation.
template <class Body>
static inline void with_factors(const float* factors, Body&& body) {
  if (factors == nullptr) body([](int64_t) { return 1.0f; });
  else body([factors](int64_t k) { return factors[k]; });
}

/// log(1 + exp(x)) to about 1 ulp, also for tiny results; x beyond 20.
static inline float softplus(float x) {
  const float u = exp_fast(x < 0 ? x : -x);
  // log(1 + u) = 2 artanh(s), s = u / (2 + u) <= 1/3.
  const float s = u / (2.0f + u), q = s * s;
  float p = 1.0f / 15;
  p = p * q + 1.0f / 13;
  p = p * q + 1.0f / 11;
  p = p * q + 1.0f / 9;
  p = p * q + 1.0f / 7;
  p = p * q + 1.0f / 5;
  p = p * q + 1.0f / 3;
  p = p * q + 1.0f;
  return (x > 0 ? x : 0.0f) + 2.0f * s * p;
}

/// Per-token values of one head and chunk.
struct SsdDecays {
  float* argument;    // dt + dt_bias
  float* step;        // Δ = softplus(argument), at least the minimum
  float* factor;      // exp(A Δ)
  float* sum;         // inclusive cumulative sum of a = A Δ; it falls, so later minus earlier is never positive
  float* from_start;  // exp(sum_i)
  float* to_end;      // exp(sum_last - sum_j)
  float* into_state;  // to_end Δ
  float total;        // exp(sum_last)

  SsdDecays(SsdScratch* scratch, const SsdPlan& plan)
      : argument(scratch->take(plan.row_width)),
        step(scratch->take(plan.row_width)),
        factor(scratch->take(plan.row_width)),
        sum(scratch->take(plan.row_width)),
        from_start(scratch->take(plan.row_width)),
        to_end(scratch->take(plan.row_width)),
        into_state(scratch->take(plan.row_width)),
        total(1) {}

  template <class T>
  void compute(const T* dt, int64_t stride, int64_t count, float bias, float minimum, float a) {
    const int64_t padded = round_up(count, ssd_vector);
    for (int64_t i = 0; i < count; ++i) argument[i] = load(dt[i * stride]) + bias;
    for (int64_t i = count; i < padded; ++i) argument[i] = 0;
#pragma omp simd
    for (int64_t i = 0; i < padded; ++i) {
      const float free = softplus(argument[i]);
      step[i] = free < minimum ? minimum : free;  // NaN stays NaN
    }
    float running = 0;
    for (int64_t i = 0; i < count; ++i) sum[i] = running += a * step[i];
    for (int64_t i = count; i < padded; ++i) sum[i] = running, to_end[i] = 0;
    // Summed from the end: of differences of sums from the start, a strong decay before them leaves few digits.
    float later = 0;
    for (int64_t i = count - 1; i >= 0; --i) to_end[i] = later, later += a * step[i];
#pragma omp simd
    for (int64_t i = 0; i < padded; ++i) {
      factor[i] = exp_fast(a * step[i]);
      from_start[i] = exp_fast(sum[i]);
      to_end[i] = exp_fast(to_end[i]);
      into_state[i] = to_end[i] * step[i];
    }
    total = exp_fast(running);
  }
};

/// Calls body(i, j, L) for the vectors of L_ij = exp(cs_i - cs_j), zero above the diagonal: lanes are columns from j
/// on, i runs from the first row of the block that contains `j`. Each row is the previous one times exp(a_i), which
/// saves an exponential for each element. L is clamped to 2^-100 below, negligible next to the diagonal's 1, so that
/// its products are not denormal.
template <class Body>
static inline void ssd_decay_vectors(const SsdDecays& decays, int64_t count, Body&& body) {
  constexpr float least = 7.8886091e-31f;
  const Vector numbers = lane_numbers();
  for (int64_t j = 0; j < round_up(count, ssd_vector); j += lanes) {
    for (int64_t i = j / ssd_row_block * ssd_row_block; i < smaller(j, count); ++i) body(i, j, Vector{});
    Vector l{};
    const int64_t whole = smaller(j + lanes, count);
    for (int64_t i = j; i < whole; ++i) {
      const float diagonal = static_cast<float>(i - j);
      const Vector next = l * decays.factor[i], held = next < least ? Vector{} + least : next;
      l = numbers < diagonal ? held : (numbers > diagonal ? Vector{} : Vector{} + 1.0f);
      body(i, j, l);
    }
    for (int64_t i = whole; i < count; ++i) {
      const Vector next = l * decays.factor[i];
      l = next < least ? Vector{} + least : next;
      body(i, j, l);
    }
  }
}

/// g[i][j] = C_i · B_j for j up to the end of row i's block; bt is Bᵀ [N, count].
static inline void ssd_scores(const float* bt, const float* c, int64_t count, const SsdPlan& plan, float* g) {
  const int64_t n = plan.state_dim;
  const Product p{c, bt, g, n, n, count, plan.row_width, 1.0f, 0.0f, false, false};
  for (int64_t row = 0; row < count; row += ssd_row_block) {
    const int64_t end = smaller(row + ssd_row_block, count);
    product(p, row, end - row, 0, end);
  }
}

}  // namespace mimo::MIMO_ISA
