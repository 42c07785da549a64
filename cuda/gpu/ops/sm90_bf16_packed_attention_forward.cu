// Attention forward on Hopper for packed sequences of any length: head dimension 80, full attention within each
// sequence, o = softmax(scale q kᵀ) v over tiles of keys with online softmax (Dao et al., FlashAttention-2; Shah et
// al., FlashAttention-3).
//
// Persistent blocks, one an SM, take work items of 256 queries of a head: four consumer warpgroups of 64 queries each,
// not synchronised with each other, so that the exponentials of one overlap the wgmma of the others. A TMA producer
// warp loads across the ends of work items: q and k of the next arrive while the current one is computed. Tiles of 64
// keys are processed from last to first, because only the last can be partial.
#include "early.cuh"
#include "sm90_attention.h"
#include "sm90_attention_forward.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

constexpr int warpgroups = 4, query_rows = 64 * warpgroups, key_rows = 64;
constexpr int head_steps = head_dim / 16, key_steps = key_rows / 16;
constexpr int narrow_bytes = narrow_tile_bytes(64);  // 64 queries or keys
constexpr int tile_bytes = head_tile_bytes(64);      // 64 values
constexpr int stages = 8, slots = 2, threads = 128 * (warpgroups + 1);
/// setmaxnreg: 640 threads start with 96 registers each.
constexpr int fetch_registers = 24, main_registers = 112;

struct Shared {
  char query[slots][warpgroups][narrow_bytes];
  char stage[stages][tile_bytes];  // k and v alternate
  uint64_t query_full[slots], query_empty[slots], full[stages], empty[stages];
  Work work[slots];
};
constexpr int64_t shared_bytes = 1024 + sizeof(Shared);

struct Problem {
  CUtensorMap q, k, v, q_end, k_end;
  int32_t* next;  // next item to claim; null: static assignment, as good where all items take equally long
  mimo_attention_forward_args args;
};

__device__ __forceinline__ int tiles_of(const Work& work) { return (work.last - work.first + key_rows - 1) / key_rows; }

__device__ __forceinline__ void fetch(const Problem& problem, Shared& shared) {
  const mimo_attention_forward_args& args = problem.args;
  const bool leads = threadIdx.x % 32 == 0;
  Walk<query_rows, false> walk{args.cu_seqlens, static_cast<int>(args.sequences)};
  int step = 0, count = 0;
  for (int number = static_cast<int>(blockIdx.x);; ++count) {
    const Work work = walk.find(number, static_cast<int>(args.query_heads));
    if (leads) {
      const int slot = count % slots;
      wait(&shared.query_empty[slot], (count / slots & 1) ^ 1);
      shared.work[slot] = work;
      const int parts = (work.count + 63) / 64;
      arrive_expecting(&shared.query_full[slot], static_cast<uint32_t>(parts * narrow_bytes));
      for (int part = 0; part < parts; ++part) {
        copy_narrow_head(shared.query[slot][part], problem.q, problem.q_end, 64, work.head, work.row + 64 * part, work.first,
                         work.last, &shared.query_full[slot]);
      }
      for (int i = work.count > 0 ? tiles_of(work) - 1 : -1; i >= 0; --i) {
#pragma unroll
        for (int values = 0; values < 2; ++values, ++step) {
          const int at = step % stages;
          wait(&shared.empty[at], (step / stages & 1) ^ 1);
          arrive_expecting(&shared.full[at], values ? tile_bytes : narrow_bytes);
          if (values) {
            copy_head(shared.stage[at], problem.v, key_rows, work.head, i * key_rows, work.first, work.last, &shared.full[at]);
          } else {
            copy_narrow_head(shared.stage[at], problem.k, problem.k_end, key_rows, work.head, i * key_rows, work.first, work.last,
                             &shared.full[at]);
          }
        }
      }
    }
    if (problem.next == nullptr) {
      number += static_cast<int>(gridDim.x);
    } else {
      if (leads) number = static_cast<int>(gridDim.x) + atomicAdd(problem.next, 1);
      number = __shfl_sync(all_lanes, number, 0);
    }
    __syncwarp();
    if (work.count == 0) return;
  }
}

__device__ __forceinline__ void multiply_queries(const Problem& problem, const Work& work, char* query, Shared& shared,
                                                 int own, int step) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool signals = lane == 0;
  int left = tiles_of(work);
  Softmax softmax{problem.args.softmax_scale * log2_e};
  float o[head_sums];
  uint32_t packed[key_rows / 4];

  const auto start_scores = [&](float (&s)[key_rows / 2], int at) {
    wait(&shared.full[at % stages], at / stages & 1);
    begin_products();
#pragma unroll
    for (int k = 0; k < head_steps; ++k) {
      multiply_64x64(s, narrow_head_along_k(query, 64, k), narrow_head_along_k(shared.stage[at % stages], key_rows, k), k > 0);
    }
    commit_products();
  };
  const auto start_values = [&](int at, bool add) {
    wait(&shared.full[at % stages], at / stages & 1);
    begin_products();
#pragma unroll
    for (int k = 0; k < key_steps; ++k) {
      multiply_64x80(o, packed + 4 * k, head_along_columns(shared.stage[at % stages], key_rows, k), add || k > 0);
    }
    commit_products();
  };

  // Each warpgroup waits for its own wgmma; the exponentials of other warpgroups run meanwhile.
  for (bool first = true; left > 0; first = false, --left, step += 2) {
    float s[key_rows / 2];
    start_scores(s, step);
    wait_products<0>();
    settle(s);
    if (signals) arrive(&shared.empty[step % stages]);
    if (first) hide_keys(s, work.last - work.first - (left - 1) * key_rows);
    softmax.weigh(s, s);
    pack_weights(s, packed);
    if (!first) softmax.rescale(o);
    start_values(step + 1, !first);
    wait_products<0>();
    settle(o);
    if (signals) arrive(&shared.empty[(step + 1) % stages]);
  }

  const int64_t heads = problem.args.query_heads, begin = work.first + work.row;
  const int row = own * 64 + warp * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = row_sum(softmax.sum[half]), factor = 1 / sum;
#pragma unroll
    for (int j = 0; j < head_sums; j += 4) o[j + 2 * half] *= factor, o[j + 2 * half + 1] *= factor;
    const int at = row + lane / 4 + 8 * half;
    if (lane % 4 == 0 && at < work.count) {
      problem.args.lse[(begin + at) * heads + work.head] = (softmax.maximum[half] + log2f(sum)) * ln_2;
    }
  }
  // The warpgroup's wgmma have read its queries: the output is staged in their place.
  synchronise_warpgroup(1 + own);
  store_head_rows(o, 1, query + warp * (narrow_bytes / 4),
                  static_cast<bf16*>(problem.args.o) + ((begin + row) * heads + work.head) * head_dim, heads * head_dim,
                  work.count - row);
}

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
  previous_is_done();
  const int own = __shfl_sync(all_lanes, threadIdx.x / 128, 0);
  if (own == warpgroups) {
    shrink_registers<fetch_registers>();
    if (threadIdx.x / 32 == 4 * warpgroups) fetch(problem, shared);
    return;
  }
  grow_registers<main_registers>();
  const bool signals = threadIdx.x % 32 == 0;
  int step = 0;
  for (int count = 0;; ++count) {
    const int slot = count % slots;
    wait(&shared.query_full[slot], count / slots & 1);
    const Work& work = shared.work[slot];  // reloaded where it is used, to save registers
    if (work.count == 0) return;
    const int steps = 2 * tiles_of(work);
    if (64 * own < work.count) {
      multiply_queries(problem, work, shared.query[slot][own], shared, own, step);
      publish_stores();
      __syncwarp();
    } else {
      for (int i = step; i < step + steps; ++i) {
        wait(&shared.full[i % stages], i / stages & 1);
        if (signals) arrive(&shared.empty[i % stages]);
      }
    }
    step += steps;
    if (signals) arrive(&shared.query_empty[slot]);
  }
#endif
}

}  // namespace

void sm90_bf16_packed_attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args) {
  const int64_t heads = args.query_heads;
  Problem problem;
  problem.q = heads_map(args.q, heads, head_dim, args.group_stride, args.token_stride, 64);
  problem.k = heads_map(args.k, heads, head_dim, args.group_stride, args.token_stride, key_rows);
  problem.v = heads_map(args.v, heads, head_dim, args.group_stride, args.token_stride, key_rows);
  problem.q_end = heads_end_map(args.q, heads, args.group_stride, args.token_stride, 64);
  problem.k_end = heads_end_map(args.k, heads, args.group_stride, args.token_stride, key_rows);
  problem.args = args;
  const bool equal = args.tokens == args.sequences * args.max_seqlen;
  const Workspace next(&stream, equal ? 0 : 4);
  problem.next = equal ? nullptr : next.as<int32_t>();
  const int64_t most = piece_count(args.tokens, args.sequences, query_rows) * heads;
  const dim3 grid = grid_of(smaller(most, stream.device->multiprocessors));
  if (equal) {
    launch_early(stream, forward_kernel, grid, dim3(threads), shared_bytes, problem);
  } else {
    check(cudaMemsetAsync(problem.next, 0, 4, stream.handle()), "clearing a counter");
    launch(stream, forward_kernel, grid, dim3(threads), shared_bytes, problem);
  }
}

}  // namespace mimo::cuda
