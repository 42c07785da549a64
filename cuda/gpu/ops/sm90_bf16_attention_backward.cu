// Attention backward on Hopper for head dimension 80, full attention within each packed sequence (Dao et al., FlashAttention-2,
// algorithm 2; warp specialisation as in Shah et al., FlashAttention-3).
//
//   p = exp(scale q kᵀ - lse)   dv = pᵀ do   dp = do vᵀ   ds = p (dp - Σ_i do_i o_i)   dq = scale ds k   dk = scale dsᵀ q
//
// Persistent blocks, one an SM, take work items of 128 keys of a head ("pieces") and loop over the sequence's queries, 64 at a
// time. Two consumer warpgroups have 64 keys each: they compute sᵀ and dpᵀ, keys as rows, so that pᵀ and dsᵀ are already in
// registers as the left operands for dv and dk, and also store dsᵀ to shared memory. A third warpgroup computes dq = ds k of 64
// queries from it. The fourth has a scheduler warp, a TMA producer warp, which loads across the ends of pieces, and two warps that
// add dq to the fp32 sums in global memory.
//
// dq is deterministic: the pieces of a sequence are added in the order of their keys, each after its predecessor; the last piece
// reads the sums, adds its own and rounds. Pieces are numbered so that a block only ever waits for lower numbers, hence there is no
// deadlock. Consecutive numbers interleave several heads, or several short sequences, so that few pieces in flight belong to the
// same head of a sequence; those fall into a stagger of about two microseconds and then no longer wait.
#include "sm90_attention.h"
#include "sm90_attention_backward.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

constexpr int query_stages = 3;
constexpr int slots = 2, adders = 2;
constexpr int value_bytes = narrow_tile_bytes(key_rows);
/// Limits of interleaving. Tokens of all interleaved heads: with more, their sums and queries, 640 bytes a token, exceed the L2
/// cache, and the power that memory draws lowers the clocks. With fewer heads, more pieces wait for each other at the start.
constexpr int alternating_tokens = 32768, most_alternating_heads = 32, fewest_alternating_heads = 4;
constexpr int near_end_tiles = 4;  // query tiles: about the time it takes to find a piece and load its keys

/// A work item: piece `index` of a head's keys in the sequence with tokens first .. last - 1.
struct Work {
  int head, first, last, index;
  int tile;  // the sequence's first query tile, counted over all sequences; head -1: no more work
};
struct Barriers {
  uint64_t work_full[slots], work_empty[slots];
  uint64_t key_full, key_empty, value_full, value_empty;
  uint64_t near_end;
  uint64_t full[query_stages], empty[query_stages];
  uint64_t ds_full[ds_buffers], ds_empty[ds_buffers];
  uint64_t dq_full[adders], dq_empty[adders];      // sums on their way to global memory
  uint64_t sums_full[adders], sums_empty[adders];  // and back
};
struct Shared {
  static constexpr int stages = query_stages;
  char key[key_bytes], value[value_bytes];
  char stage[stages][stage_bytes];  // q, then do
  char ds[ds_buffers][ds_bytes];    // [key][query]
  float dq[adders][dq_floats];      // float4 j of thread t at index j * 128 + t
  float statistics[stages][statistics_floats];
  Barriers barriers;
  Work work[slots];
};
constexpr int64_t shared_bytes = 1024 + sizeof(Shared);

struct Problem : BackwardProblem {
  CUtensorMap v_end;
  float* dq;                // [head][query tile], each in the layout of Shared::dq
  int32_t* added;           // [head][query tile]: number of pieces added so far
  int32_t* next;            // number of the next piece
  int32_t key_tiles;        // piece_count
};

__device__ __forceinline__ int query_tiles_of(const Work& work) {
  return (work.last - work.first + query_rows - 1) / query_rows;
}
__device__ __forceinline__ bool is_last(const Work& work) {
  return (work.index + 1) * key_rows >= work.last - work.first;
}

/// Calls body(work) for each piece that this block is given.
template <class Body>
__device__ __forceinline__ void for_each_work(Shared& shared, Body&& body) {
  for (int turn = 0;; ++turn) {
    const int slot = turn % slots;
    wait(&shared.barriers.work_full[slot], turn / slots & 1);
    const Work work = shared.work[slot];
    if (work.head < 0) return;
    body(work);
    __syncwarp(__activemask());
    if (threadIdx.x % 32 == 0) arrive(&shared.barriers.work_empty[slot]);
  }
}

// ---- fourth warpgroup: scheduler, producer, dq reduction -----------------------------------------------------------

/// Spins until `pieces` pieces have been added to a query tile.
__device__ __forceinline__ void await_added(const int32_t* added, int pieces) {
  int32_t count;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(added) : "memory");
  } while (count != pieces);
  asm volatile("fence.proxy.async;" ::: "memory");
}

/// Maps piece numbers, which must rise, to pieces; executed by a whole warp. A group is some heads of one sequence, or all heads of
/// a few short sequences; its numbers list the first piece of each head of each sequence, then all second pieces, etc.
struct Walk {
  const int32_t* cu_seqlens;
  int sequences, heads;
  int first = 0, first_head = 0, pieces = 0;  // first sequence and head of the group; pieces of the lane's sequence
  int in_group = 0, group_heads = 0;          // sequences (at most 32) and heads of the group
  int index = 0, before = 0;                  // before: how many numbers precede that of the first piece `index`

  __device__ __forceinline__ Walk(const mimo_attention_backward_args& args)
      : cu_seqlens(args.cu_seqlens), sequences(static_cast<int>(args.sequences)), heads(static_cast<int>(args.query_heads)) {
    count_pieces();
  }
  /// Sets up the group of sequences that begins with sequence `first`.
  __device__ __forceinline__ void count_pieces() {
    const int length = max(1, cu_seqlens[first + 1] - cu_seqlens[first]);
    const int most = min(max(alternating_tokens / length, fewest_alternating_heads), most_alternating_heads);
    const int parts = (heads + most - 1) / most;
    in_group = max(1, most / heads), group_heads = (heads + parts - 1) / parts;
    const int lane = threadIdx.x % 32, own = first + lane;
    pieces = lane < in_group && own < sequences ? static_cast<int>(first_piece(cu_seqlens, own + 1, key_rows) -
                                                                   first_piece(cu_seqlens, own, key_rows))
                                                : 0;
  }
  /// The piece of some numbers begins past its sequence's end: no work.
  __device__ __forceinline__ Work find(int number) {
    unsigned live;
    int alternating;  // interleaved heads
    for (;;) {
      live = __ballot_sync(all_lanes, pieces > index);
      alternating = min(group_heads, heads - first_head);
      const int here = __popc(live) * alternating;
      if (number < before + here) break;
      before += here, ++index;
      if (live != 0) continue;
      index = 0, first_head += group_heads;
      if (first_head < heads) continue;
      first += in_group, first_head = 0;
      count_pieces();
    }
    const int left = number - before, lane = threadIdx.x % 32;
    const bool owns = pieces > index && __popc(live & ((1u << lane) - 1)) == left / alternating;
    const int sequence = first + __ffs(static_cast<int>(__ballot_sync(all_lanes, owns))) - 1;
    return {first_head + left % alternating, cu_seqlens[sequence], cu_seqlens[sequence + 1], index,
            static_cast<int>(first_piece(cu_seqlens, sequence, query_rows))};
  }
};

/// Scheduler warp: claims the next piece only when the block is near the end of one; claimed earlier, it would delay the pieces
/// that wait for it.
__device__ __forceinline__ void take(const Problem& problem, Shared& shared) {
  Walk walk(problem.args);
  const int numbers = problem.key_tiles * walk.heads;
  const bool leads = threadIdx.x % 32 == 0;
  uint32_t parity = 0;
  for (int turn = 0;;) {
    const int number = __shfl_sync(all_lanes, leads ? atomicAdd(problem.next, 1) : 0, 0), slot = turn % slots;
    Work work{-1, 0, 0, 0, 0};
    if (number < numbers) {
      work = walk.find(number);
      if (work.index * key_rows >= work.last - work.first) continue;
    }
    wait(&shared.barriers.work_empty[slot], (turn / slots & 1) ^ 1);
    if (leads) {
      shared.work[slot] = work;
      arrive(&shared.barriers.work_full[slot]);
    }
    if (work.head < 0) return;
    wait(&shared.barriers.near_end, parity);
    parity ^= 1;
    ++turn;
  }
}

/// Producer warp. The first queries are loaded before the keys, because their stages are free earlier.
__device__ __forceinline__ void fetch(const Problem& problem, Shared& shared) {
  Barriers& barriers = shared.barriers;
  int step = 0;
  uint32_t parity = 1;
  for_each_work(shared, [&](const Work& work) {
    const int query_tiles = query_tiles_of(work);
    const float* const statistics = statistics_of(problem, work.head, work.tile);
    for (int i = 0; i < query_tiles; ++i, ++step) {
      const int slot = step % query_stages;
      uint64_t* const full = &barriers.full[slot];
      wait(&barriers.empty[slot], (step / query_stages & 1) ^ 1);
      copy_queries(shared.stage[slot], shared.statistics[slot], problem.q, problem.d_o, statistics, i, work.head, work.first,
                   work.last, full);
      if (i > 0) continue;
      wait(&barriers.value_empty, parity);
      arrive_expecting(&barriers.value_full, value_bytes);
      copy_narrow_head(shared.value, problem.v, problem.v_end, key_rows, work.head, work.index * key_rows, work.first, work.last,
                       &barriers.value_full);
      wait(&barriers.key_empty, parity);
      arrive_expecting(&barriers.key_full, key_bytes);
      copy_head(shared.key, problem.k, key_rows, work.head, work.index * key_rows, work.first, work.last, &barriers.key_full);
      parity ^= 1;
    }
  });
}

/// Reduction warp `own`: adds every `adders`-th dq tile to the sums in memory or, for a sequence's last piece, loads the sums of
/// the pieces before.
__device__ __forceinline__ void add_dq(const Problem& problem, Shared& shared, int own) {
  Barriers& barriers = shared.barriers;
  uint32_t full = 0, empty = 1;
  for_each_work(shared, [&](const Work& work) {
    const bool last = is_last(work);
    if (last && work.index == 0) return;
    const int64_t first = static_cast<int64_t>(work.head) * problem.query_tiles + work.tile;
    const int query_tiles = query_tiles_of(work);
    for (int i = own; i < query_tiles; i += adders) {
      float* const sums = problem.dq + (first + i) * dq_floats;
      int32_t* const added = problem.added + first + i;
      if (last) {
        wait(&barriers.sums_empty[own], empty);
        empty ^= 1;
        await_added(added, work.index);
        arrive_expecting(&barriers.sums_full[own], dq_bytes);
        copy_bytes(shared.dq[own], sums, dq_bytes, &barriers.sums_full[own]);
        continue;
      }
      wait(&barriers.dq_full[own], full);
      full ^= 1;
      if (work.index == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(sums),
                     "r"(shared_address(shared.dq[own])), "r"(dq_bytes)
                     : "memory");
      } else {
        await_added(added, work.index);
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums),
                     "r"(shared_address(shared.dq[own])), "r"(dq_bytes)
                     : "memory");
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      arrive(&barriers.dq_empty[own]);
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      asm volatile("fence.proxy.async;" ::: "memory");
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(added), "r"(work.index + 1) : "memory");
    }
  });
}

// ---- third warpgroup: dq ---------------------------------------------------------------------------------------

__device__ __forceinline__ void multiply_dq(const Problem& problem, Shared& shared) {
  Barriers& barriers = shared.barriers;
  const int thread = threadIdx.x % 128, warp = thread / 32;
  const bool signals = thread % 32 == 0;
  int step = 0;
  uint32_t parity = 0, sums_full = 0, dq_empty = (1 << adders) - 1;  // one parity bit for each adder
  for_each_work(shared, [&](const Work& work) {
    const int query_tiles = query_tiles_of(work);
    const bool last = is_last(work);
    wait(&barriers.key_full, parity);
    parity ^= 1;
    for (int i = 0; i < query_tiles; ++i, ++step) {
      float sum[head_sums];
      const int buffer = step % ds_buffers, adder = i % adders;
      float4* const staged = reinterpret_cast<float4*>(shared.dq[adder]) + thread;
      wait(&barriers.ds_full[buffer], step / ds_buffers & 1);
      multiply_ds_with_keys(sum, shared.ds[buffer], shared.key, false);
      if (signals && i + 1 == query_tiles) arrive(&barriers.key_empty);
      if (signals) arrive(&barriers.ds_empty[buffer]);
      if (!last) {
        wait(&barriers.dq_empty[adder], dq_empty >> adder & 1);
        dq_empty ^= 1 << adder;
#pragma unroll
        for (int n = 0; n < head_sums / 4; ++n) {
          staged[n * 128] = make_float4(sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]);
        }
        publish_stores();
        __syncwarp();
        if (signals) arrive(&barriers.dq_full[adder]);
        continue;
      }
      if (work.index > 0) {
        wait(&barriers.sums_full[adder], sums_full >> adder & 1);
        sums_full ^= 1 << adder;
#pragma unroll
        for (int n = 0; n < head_sums / 4; ++n) {
          const float4 before = staged[n * 128];
          sum[4 * n] += before.x, sum[4 * n + 1] += before.y, sum[4 * n + 2] += before.z, sum[4 * n + 3] += before.w;
        }
        publish_stores();
        __syncwarp();
        if (signals) arrive(&barriers.sums_empty[adder]);
      }
      const int64_t row = i * query_rows + warp * 16, stride = problem.args.d_token_stride;
      store_head_rows(sum, problem.args.softmax_scale,
                      static_cast<bf16*>(problem.args.dq) + (work.first + row) * stride + work.head * problem.args.group_stride,
                      stride, static_cast<int>(work.last - work.first - row));
    }
  });
}

// ---- first and second warpgroup: dk, dv ------------------------------------------------------------------------

__device__ __forceinline__ void multiply_keys(const Problem& problem, Shared& shared, int own) {
  Barriers& barriers = shared.barriers;
  const int warp = threadIdx.x / 32 % 4, first_row = own * 64 + warp * 16;
  const bool signals = threadIdx.x % 32 == 0;
  const float scale = problem.args.softmax_scale;
  const int64_t stride = problem.args.d_token_stride;
  const auto value = [&](int k) { return narrow_head_along_k(shared.value, key_rows, k, own * 64); };
  int step = 0;
  uint32_t parity = 0;
  for_each_work(shared, [&](const Work& work) {
    const int query_tiles = query_tiles_of(work), key_count = min(key_rows, work.last - work.first - work.index * key_rows);
    wait(&barriers.key_full, parity);
    wait(&barriers.value_full, parity);
    parity ^= 1;
    float dk[head_sums], dv[head_sums];
    multiply_keys_with_queries(
        shared, shared.key + own * 64 * tile_row_bytes, value, own, key_count, query_tiles, scale * log2_e, step, dk, dv,
        [&](int i) {
          if (signals && i == max(0, query_tiles - near_end_tiles)) arrive(&barriers.near_end);
        },
        [&](int i) {
          if (signals && i + 1 == query_tiles) arrive(&barriers.key_empty);
        },
        [&](int i) {
          if (signals && i + 1 == query_tiles) arrive(&barriers.value_empty);
        });
    const int64_t to = (work.first + static_cast<int64_t>(work.index) * key_rows + first_row) * stride +
                       work.head * problem.args.group_stride;
    store_head_rows(dv, 1, static_cast<bf16*>(problem.args.dv) + to, stride, key_count - first_row);
    store_head_rows(dk, scale, static_cast<bf16*>(problem.args.dk) + to, stride, key_count - first_row);
  });
}

// ---- kernels ---------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(backward_threads, 1) backward_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  Shared& shared = *reinterpret_cast<Shared*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  Barriers& barriers = shared.barriers;
  if (threadIdx.x == 0) {
    for (int i = 0; i < slots; ++i) {
      initialise(&barriers.work_full[i], 1);
      initialise(&barriers.work_empty[i], main_warps + dq_warps + 1 + adders);
    }
    initialise(&barriers.near_end, main_warps);
    initialise(&barriers.key_full, 1), initialise(&barriers.key_empty, main_warps + dq_warps);
    initialise(&barriers.value_full, 1), initialise(&barriers.value_empty, main_warps);
    for (int i = 0; i < adders; ++i) {
      initialise(&barriers.dq_full[i], dq_warps), initialise(&barriers.dq_empty[i], 1);
      initialise(&barriers.sums_full[i], 1), initialise(&barriers.sums_empty[i], dq_warps);
    }
    initialise_stages(barriers);
    publish_barriers();
  }
  __syncthreads();
  previous_is_done();
  divide_labour(
      [&] {
        const int warp = threadIdx.x / 32;
        if (warp > adders) {
          take(problem, shared);
        } else if (threadIdx.x % 32 == 0 && warp == 0) {
          fetch(problem, shared);
        } else if (threadIdx.x % 32 == 0) {
          add_dq(problem, shared, warp - 1);
        }
      },
      [&] { multiply_dq(problem, shared); }, [&](int own) { multiply_keys(problem, shared, own); });
#endif
}

/// Writes the statistics of the queries and zeroes the counters.
__global__ void __launch_bounds__(256) statistics_kernel(mimo_attention_backward_args args, int64_t query_tiles, float* to,
                                                         int32_t* added, int32_t* next) {
  previous_is_done();
  const int64_t first = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (first == 0 && blockIdx.x == 0) *next = 0;
  if (first < args.query_heads) added[first * query_tiles + blockIdx.x] = 0;
  const Piece piece = find_piece(args.cu_seqlens, args.sequences, query_rows, blockIdx.x);
  if (piece.count > 0) write_statistics(args, piece, query_tiles, to);
}

}  // namespace

void sm90_bf16_attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args) {
  const int64_t heads = args.query_heads, query_tiles = piece_count(args.tokens, args.sequences, query_rows);
  const int64_t key_tiles = piece_count(args.tokens, args.sequences, key_rows);
  Workspace statistics(&stream, heads * query_tiles * statistics_bytes), dq(&stream, heads * query_tiles * dq_bytes);
  Workspace counters(&stream, (heads * query_tiles + 1) * 4);
  Problem problem;
  describe(args, statistics.as<float>(), problem);
  problem.v_end = heads_end_map(args.v, heads, args.group_stride, args.token_stride, key_rows);
  problem.dq = dq.as<float>();
  problem.next = counters.as<int32_t>();
  problem.added = problem.next + 1;
  problem.key_tiles = static_cast<int32_t>(key_tiles);
  launch_early(stream, statistics_kernel, grid_of(query_tiles, ceil_div(2 * query_rows * heads, 256)), dim3(256), 0, args,
               query_tiles, statistics.as<float>(), problem.added, problem.next);
  launch_early(stream, backward_kernel, grid_of(smaller(key_tiles * heads, stream.device->multiprocessors)),
               dim3(backward_threads), shared_bytes, problem);
}

}  // namespace mimo::cuda
