// Attention forward on Hopper for head dimension 128, with or without a causal mask, any number of query heads to a key
// head: o = softmax(scale q kᵀ) v over tiles of keys with online softmax (Dao et al., FlashAttention-2; Shah et al.,
// FlashAttention-3).
//
// Persistent blocks, one an SM, claim work items of 128 queries of a head, the longest of a sequence first: two consumer
// warpgroups of 64 queries each and a TMA producer warp, which loads across the ends of items. The warpgroups issue
// their products in turn, so that the exponentials of one overlap the products of the other; within a warpgroup p v of
// a tile overlaps the exponentials of the next. Key tiles are processed from last to first, because only the last can be
// partial or cross the diagonal.
#include "sm90_attention.h"
#include "sm90_attention_forward.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

constexpr int width = grouped_head_dim, warpgroups = 2, query_rows = 64 * warpgroups, key_rows = 128;
constexpr int head_steps = width / 16, key_steps = key_rows / 16;
constexpr int tile_bytes = head_tile_bytes(128);
constexpr int stages = 4, slots = 2, threads = 128 * (warpgroups + 1);
/// setmaxnreg: 384 threads start with 168 registers each.
constexpr int fetch_registers = 24, main_registers = 240;

struct Shared {
  char query[slots][tile_bytes];
  char stage[stages][tile_bytes];  // k and v in the order of their use
  uint64_t query_full[slots], query_empty[slots], full[stages], empty[stages];
  Work work[slots];
};
constexpr int64_t shared_bytes = 1024 + sizeof(Shared);

struct Problem {
  CUtensorMap q, k, v;  // q: columns of all heads of a group
  int32_t* next;        // next item to claim
  mimo_attention_forward_args args;
};

template <bool causal>
__device__ __forceinline__ int tiles_of(const Work& work) {
  return causal ? work.row / key_rows + 1 : (work.last - work.first + key_rows - 1) / key_rows;
}

/// Copies 128 rows of 128 columns, in two tiles of 64.
__device__ __forceinline__ void copy_rows(char* to, const CUtensorMap& map, int column, int group, int row, const Work& work,
                                          uint64_t* barrier) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    copy_head_box(to + half * half_tile_bytes(128), map, column + half * tile_width, group, row, work.first, work.last, barrier);
  }
}

template <bool causal>
__device__ __forceinline__ void fetch(const Problem& problem, Shared& shared) {
  const mimo_attention_forward_args& args = problem.args;
  const int heads = static_cast<int>(args.query_heads), per_group = heads / static_cast<int>(args.key_heads);
  const bool leads = threadIdx.x % 32 == 0;
  Walk<query_rows, causal> walk{args.cu_seqlens, static_cast<int>(args.sequences)};
  int step = 0;
  for (int number = static_cast<int>(blockIdx.x), count = 0;; ++count) {
    const Work work = walk.find(number, heads);
    if (leads) {
      const int slot = count % slots, group = work.head / per_group;
      wait(&shared.query_empty[slot], (count / slots & 1) ^ 1);
      shared.work[slot] = work;
      arrive_expecting(&shared.query_full[slot], work.count > 0 ? tile_bytes : 0);
      if (work.count > 0) {
        copy_rows(shared.query[slot], problem.q, work.head % per_group * width, group, work.row, work, &shared.query_full[slot]);
      }
      const auto load = [&](const CUtensorMap& map, int tile) {
        const int at = step % stages;
        wait(&shared.empty[at], (step / stages & 1) ^ 1);
        arrive_expecting(&shared.full[at], tile_bytes);
        copy_rows(shared.stage[at], map, 0, group, tile * key_rows, work, &shared.full[at]);
        ++step;
      };
      const int tiles = work.count > 0 ? tiles_of<causal>(work) : 0;
      for (int i = tiles - 1; i >= 0; --i) {
        load(problem.k, i);
        if (i + 1 < tiles) load(problem.v, i + 1);
      }
      if (tiles > 0) load(problem.v, 0);
      number = static_cast<int>(gridDim.x) + atomicAdd(problem.next, 1);
    }
    number = __shfl_sync(all_lanes, number, 0);
    if (work.count == 0) return;
  }
}

/// Hides the keys after each query, of a tile of keys and queries on the diagonal.
__device__ __forceinline__ void hide_later_keys(float (&s)[key_rows / 2], int own) {
  const int lane = threadIdx.x % 32, row = own * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < key_rows / 2; ++j) {
    if (j / 4 * 8 + column + j % 2 > row + 8 * row_of(j)) s[j] = -INFINITY;
  }
}

/// `step`: running number of loaded tiles.
template <bool causal>
__device__ __forceinline__ void multiply_queries(const Problem& problem, const Work& work, const char* query, Shared& shared,
                                                 uint64_t* query_empty, int own, int& step) {
  const bool signals = threadIdx.x % 32 == 0;
  const int tiles = tiles_of<causal>(work);
  Softmax softmax{problem.args.softmax_scale * log2_e};
  float o[width / 2], s[key_rows / 2];
  uint32_t packed[key_rows / 4];

  const auto start_scores = [&](int at) {
    begin_products();
#pragma unroll
    for (int k = 0; k < head_steps; ++k) {
      multiply_64x128(s, wide_head_along_k(query, 128, k), wide_head_along_k(shared.stage[at % stages], key_rows, k), k > 0);
    }
    commit_products();
  };
  const auto start_values = [&](int at, bool add) {
    begin_products();
#pragma unroll
    for (int k = 0; k < key_steps; ++k) {
      multiply_64x128(o, packed + 4 * k, head_along_columns(shared.stage[at % stages], key_rows, k), add || k > 0);
    }
    commit_products();
  };
  const auto await_tile = [&](int at) { wait(&shared.full[at % stages], at / stages & 1); };
  const auto free_tile = [&](int at) {
    if (signals) arrive(&shared.empty[at % stages]);
  };

  await_tile(step);
  start_scores(step);
  wait_products<0>();
  settle(s);
  free_tile(step++);
  if (causal) {
    hide_later_keys(s, own);
  } else {
    hide_keys(s, work.last - work.first - (tiles - 1) * key_rows);
  }
  softmax.weigh(s, s);
  pack_weights(s, packed);
  for (int i = 1; i < tiles; ++i, step += 2) {
    await_tile(step);
    await_turn(own);
    start_scores(step);
    await_tile(step + 1);
    start_values(step + 1, i > 1);
    pass_turn(own);
    wait_products<1>();
    settle(s);
    free_tile(step);
    softmax.weigh(s, s);
    wait_products<0>();
    settle(o);
    free_tile(step + 1);
    softmax.rescale(o);
    pack_weights(s, packed);
  }
  if (signals) arrive(query_empty);
  await_tile(step);
  start_values(step, tiles > 1);
  wait_products<0>();
  settle(o);
  free_tile(step++);

  const int lane = threadIdx.x % 32, row = own * 64 + threadIdx.x / 32 % 4 * 16;
  const int64_t heads = problem.args.query_heads, begin = work.first + work.row + row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = row_sum(softmax.sum[half]), factor = 1 / sum;
#pragma unroll
    for (int j = 0; j < width / 2; j += 4) o[j + 2 * half] *= factor, o[j + 2 * half + 1] *= factor;
    const int at = lane / 4 + 8 * half;
    if (lane % 4 == 0 && row + at < work.count) {
      problem.args.lse[(begin + at) * heads + work.head] = (softmax.maximum[half] + log2f(sum)) * ln_2;
    }
  }
  store_head_rows(o, 1, static_cast<bf16*>(problem.args.o) + (begin * heads + work.head) * width, heads * width, work.count - row);
}

template <bool causal>
__global__ void __launch_bounds__(threads, 1) forward_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  Shared& shared = *reinterpret_cast<Shared*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < slots; ++i) initialise(&shared.query_full[i], 1), initialise(&shared.query_empty[i], 4 * warpgroups);
    for (int i = 0; i < stages; ++i) initialise(&shared.full[i], 1), initialise(&shared.empty[i], 4 * warpgroups);
    publish_barriers();
  }
  __syncthreads();
  const int own = __shfl_sync(all_lanes, threadIdx.x / 128, 0) - 1;
  if (own < 0) {
    shrink_registers<fetch_registers>();
    if (threadIdx.x < 32) fetch<causal>(problem, shared);
    return;
  }
  grow_registers<main_registers>();
  if (own == 1) pass_turn(own);
  int step = 0;
  for (int count = 0;; ++count) {
    const int slot = count % slots;
    wait(&shared.query_full[slot], count / slots & 1);
    const Work work = shared.work[slot];
    if (work.count == 0) break;
    multiply_queries<causal>(problem, work, shared.query[slot] + own * 64 * tile_row_bytes, shared, &shared.query_empty[slot],
                             own, step);
  }
  if (own == 0) await_turn(own);
#endif
}

}  // namespace

void sm90_bf16_grouped_query_attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args) {
  const int64_t groups = args.key_heads, items = piece_count(args.tokens, args.sequences, query_rows) * args.query_heads;
  const Workspace next(&stream, 4);
  Problem problem;
  problem.q = heads_map(args.q, groups, args.query_heads / groups * width, args.group_stride, args.token_stride, query_rows);
  problem.k = heads_map(args.k, groups, width, args.group_stride, args.token_stride, key_rows);
  problem.v = heads_map(args.v, groups, width, args.group_stride, args.token_stride, key_rows);
  problem.args = args;
  problem.next = next.as<int32_t>();
  check(cudaMemsetAsync(problem.next, 0, 4, stream.handle()), "clearing a counter");
  launch(stream, args.mask == MIMO_ATTENTION_CAUSAL ? forward_kernel<true> : forward_kernel<false>,
         grid_of(smaller(items, stream.device->multiprocessors)), dim3(threads), shared_bytes, problem);
}

}  // namespace mimo::cuda
