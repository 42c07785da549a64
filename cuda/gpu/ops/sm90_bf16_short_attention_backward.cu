// Attention backward on Hopper for many short packed sequences: head dimension 80, full attention within each sequence
// (Dao et al., FlashAttention-2, algorithm 2; warp specialisation as in Shah et al., FlashAttention-3).
//
//   p = exp(scale q kᵀ - lse)   dv = pᵀ do   dp = do vᵀ   ds = p (dp - Σ_i do_i o_i)   dq = scale ds k   dk = scale dsᵀ q
//
// Persistent blocks, one an SM, take a head of a whole sequence at a time, longest sequences first. The outer loop runs
// over tiles of 128 keys, the inner loop over tiles of 64 queries. Two consumer warpgroups have 64 keys each: they
// compute sᵀ and dpᵀ, keys as rows, so that pᵀ and dsᵀ are already in registers as the left operands for dv and dk, and
// also store dsᵀ to shared memory. A third warpgroup computes dq from it. Between key tiles the sums of dq are kept in
// global memory; each element belongs to one thread, so there is no synchronisation, and the last key tile rounds them.
// A TMA producer warp of the fourth warpgroup loads across the ends of tiles and sequences.
#include "sm90_attention.h"
#include "sm90_attention_backward.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

constexpr int query_stages = 2;
constexpr int slots = 2;  // buffers of work items, and of k and v

/// A work item: a head of the sequence with tokens first .. last - 1.
struct Work {
  int head, first, last, tile;  // the sequence's first tile in the statistics; head -1: no more work
};
struct Barriers {
  uint64_t work_full[slots], work_empty[slots];
  uint64_t keys_full[slots], keys_empty[slots];
  uint64_t full[query_stages], empty[query_stages];
  uint64_t ds_full[ds_buffers], ds_empty[ds_buffers];
};
struct Shared {
  static constexpr int stages = query_stages;
  char key[slots][key_bytes], value[slots][key_bytes];
  char stage[stages][stage_bytes];  // q, then do
  char ds[ds_buffers][ds_bytes];    // [key][query]
  float statistics[stages][statistics_floats];
  Barriers barriers;
  Work work[slots];
};
constexpr int64_t shared_bytes = 1024 + sizeof(Shared);

struct Problem : BackwardProblem {
  float* dq;                // [block][query tile]: float4 j of thread t at index j * 128 + t
  const int32_t* order;     // sequences, longest first
  int32_t* next;            // number of the next work item
  int32_t most_tiles;       // query tiles of the longest sequence
};

__device__ __forceinline__ int tiles_of(const Work& work, int rows) { return (work.last - work.first + rows - 1) / rows; }

// ---- fourth warpgroup: scheduler and producer -------------------------------------------------------------------

/// Claims the next work item while the block computes the current one.
__device__ __forceinline__ void take(const Problem& problem, Shared& shared) {
  Barriers& barriers = shared.barriers;
  const mimo_attention_backward_args& args = problem.args;
  const int heads = static_cast<int>(args.query_heads), count = static_cast<int>(args.sequences) * heads;
  int number = blockIdx.x;
  for (int turn = 0;; ++turn, number = static_cast<int>(gridDim.x) + atomicAdd(problem.next, 1)) {
    const int slot = turn % slots;
    Work work{-1, 0, 0, 0};
    if (number < count) {
      const int sequence = problem.order[number / heads];
      work = {number % heads, args.cu_seqlens[sequence], args.cu_seqlens[sequence + 1],
              static_cast<int>(first_piece(args.cu_seqlens, sequence, query_rows))};
    }
    wait(&barriers.work_empty[slot], (turn / slots & 1) ^ 1);
    shared.work[slot] = work;
    arrive(&barriers.work_full[slot]);
    if (work.head < 0) return;
  }
}

__device__ __forceinline__ void fetch(const Problem& problem, Shared& shared) {
  Barriers& barriers = shared.barriers;
  int step = 0, key_step = 0;
  for (int turn = 0;; ++turn) {
    const int slot = turn % slots;
    wait(&barriers.work_full[slot], turn / slots & 1);
    const Work work = shared.work[slot];
    arrive(&barriers.work_empty[slot]);
    if (work.head < 0) return;
    const int query_tiles = tiles_of(work, query_rows), key_tiles = tiles_of(work, key_rows);
    const float* const statistics = statistics_of(problem, work.head, work.tile);
    for (int j = 0; j < key_tiles; ++j, ++key_step) {
      const int at = key_step % slots;
      uint64_t* const keys = &barriers.keys_full[at];
      wait(&barriers.keys_empty[at], (key_step / slots & 1) ^ 1);
      arrive_expecting(keys, 2 * key_bytes);
      copy_head(shared.key[at], problem.k, key_rows, work.head, j * key_rows, work.first, work.last, keys);
      copy_head(shared.value[at], problem.v, key_rows, work.head, j * key_rows, work.first, work.last, keys);
      for (int i = 0; i < query_tiles; ++i, ++step) {
        const int stage = step % query_stages;
        uint64_t* const full = &barriers.full[stage];
        wait(&barriers.empty[stage], (step / query_stages & 1) ^ 1);
        copy_queries(shared.stage[stage], shared.statistics[stage], problem.q, problem.d_o, statistics, i, work.head, work.first,
                     work.last, full);
      }
    }
  }
}

/// Calls body(work) for each head of a sequence that this block is given.
template <class Body>
__device__ __forceinline__ void for_each_work(Shared& shared, Body&& body) {
  for (int turn = 0;; ++turn) {
    const int slot = turn % slots;
    wait(&shared.barriers.work_full[slot], turn / slots & 1);
    const Work work = shared.work[slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.barriers.work_empty[slot]);
    if (work.head < 0) return;
    body(work);
  }
}

// ---- third warpgroup: dq ---------------------------------------------------------------------------------------

__device__ __forceinline__ void multiply_dq(const Problem& problem, Shared& shared) {
  Barriers& barriers = shared.barriers;
  const int thread = threadIdx.x % 128, warp = thread / 32;
  const bool signals = thread % 32 == 0;
  float4* const own_sums = reinterpret_cast<float4*>(problem.dq) +
                           static_cast<int64_t>(blockIdx.x) * problem.most_tiles * (dq_floats / 4) + thread;
  int step = 0, key_step = 0;
  for_each_work(shared, [&](const Work& work) {
    const int query_tiles = tiles_of(work, query_rows), key_tiles = tiles_of(work, key_rows);
    for (int j = 0; j < key_tiles; ++j, ++key_step) {
      const char* const key = shared.key[key_step % slots];
      wait(&barriers.keys_full[key_step % slots], key_step / slots & 1);
      for (int i = 0; i < query_tiles; ++i, ++step) {
        const int buffer = step % ds_buffers;
        float4* const sums = own_sums + i * (dq_floats / 4);
        float sum[head_sums];
        if (j > 0) {
#pragma unroll
          for (int n = 0; n < head_sums / 4; ++n) {
            const float4 part = sums[n * 128];
            sum[4 * n] = part.x, sum[4 * n + 1] = part.y, sum[4 * n + 2] = part.z, sum[4 * n + 3] = part.w;
          }
        }
        wait(&barriers.ds_full[buffer], step / ds_buffers & 1);
        multiply_ds_with_keys(sum, shared.ds[buffer], key, j > 0);
        if (signals) arrive(&barriers.ds_empty[buffer]);
        if (j + 1 < key_tiles) {
#pragma unroll
          for (int n = 0; n < head_sums / 4; ++n) {
            sums[n * 128] = make_float4(sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]);
          }
        } else {
          const int64_t row = i * query_rows + warp * 16;
          store_head_rows(sum, problem.args.softmax_scale,
                          static_cast<bf16*>(problem.args.dq) + (work.first + row) * problem.args.d_token_stride +
                              work.head * problem.args.group_stride,
                          problem.args.d_token_stride, static_cast<int>(work.last - work.first - row));
        }
      }
      if (signals) arrive(&barriers.keys_empty[key_step % slots]);
    }
  });
}

// ---- first and second warpgroup: dk, dv ------------------------------------------------------------------------

__device__ __forceinline__ void multiply_keys(const Problem& problem, Shared& shared, int own) {
  Barriers& barriers = shared.barriers;
  const int warp = threadIdx.x / 32 % 4, first_row = own * 64 + warp * 16;
  const float scale = problem.args.softmax_scale;
  const int64_t stride = problem.args.d_token_stride;
  int step = 0, key_step = 0;
  for_each_work(shared, [&](const Work& work) {
    const int query_tiles = tiles_of(work, query_rows), key_tiles = tiles_of(work, key_rows);
    for (int tile = 0; tile < key_tiles; ++tile, ++key_step) {
      const int at = key_step % slots, key_count = min(key_rows, work.last - work.first - tile * key_rows);
      wait(&barriers.keys_full[at], key_step / slots & 1);
      const char* const own_value = shared.value[at] + own * 64 * tile_row_bytes;
      const auto value = [&](int k) { return head_along_k(own_value, key_rows, k); };
      const auto nothing = [](int) {};
      float dk[head_sums], dv[head_sums];
      multiply_keys_with_queries(shared, shared.key[at] + own * 64 * tile_row_bytes, value, own, key_count, query_tiles,
                                 scale * log2_e, step, dk, dv, nothing, nothing, nothing);
      if (threadIdx.x % 32 == 0) arrive(&barriers.keys_empty[at]);
      const int64_t to = (work.first + static_cast<int64_t>(tile) * key_rows + first_row) * stride +
                         work.head * problem.args.group_stride;
      store_head_rows(dv, 1, static_cast<bf16*>(problem.args.dv) + to, stride, key_count - first_row);
      store_head_rows(dk, scale, static_cast<bf16*>(problem.args.dk) + to, stride, key_count - first_row);
    }
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
      initialise(&barriers.work_full[i], 1), initialise(&barriers.work_empty[i], main_warps + dq_warps + 1);
      initialise(&barriers.keys_full[i], 1), initialise(&barriers.keys_empty[i], main_warps + dq_warps);
    }
    initialise_stages(barriers);
    publish_barriers();
  }
  __syncthreads();
  previous_is_done();
  divide_labour(
      [&] {
        if (threadIdx.x == 0) fetch(problem, shared);
        if (threadIdx.x == 96) take(problem, shared);
      },
      [&] { multiply_dq(problem, shared); }, [&](int own) { multiply_keys(problem, shared, own); });
#endif
}

/// Writes sequence blockIdx.x to its rank in `order` (longest first).
__device__ __forceinline__ void rank_sequence(const mimo_attention_backward_args& args, int32_t* order, int32_t* next) {
  const int own = static_cast<int>(blockIdx.x), lane = threadIdx.x;
  if (own == 0 && lane == 0) *next = 0;
  if (own >= args.sequences || lane >= 32) return;
  const int length = args.cu_seqlens[own + 1] - args.cu_seqlens[own];
  int before = 0;
  for (int i = lane; i < args.sequences; i += 32) {
    const int other = args.cu_seqlens[i + 1] - args.cu_seqlens[i];
    before += other > length || (other == length && i < own);
  }
  before = __reduce_add_sync(all_lanes, before);
  if (lane == 0) order[before] = own;
}

__global__ void __launch_bounds__(256) statistics_kernel(mimo_attention_backward_args args, int64_t query_tiles, float* to,
                                                         int32_t* order, int32_t* next) {
  previous_is_done();
  if (blockIdx.y == 0) rank_sequence(args, order, next);
  const Piece piece = find_piece(args.cu_seqlens, args.sequences, query_rows, blockIdx.x);
  if (piece.count > 0) write_statistics(args, piece, query_tiles, to);
}

}  // namespace

void sm90_bf16_short_attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args) {
  const int64_t heads = args.query_heads, query_tiles = piece_count(args.tokens, args.sequences, query_rows);
  const int64_t blocks = smaller(args.sequences * heads, stream.device->multiprocessors);
  const int64_t most_tiles = ceil_div(args.max_seqlen, query_rows);
  Workspace statistics(&stream, heads * query_tiles * statistics_bytes), dq(&stream, blocks * most_tiles * dq_bytes);
  Workspace order(&stream, (args.sequences + 1) * 4);
  Problem problem;
  describe(args, statistics.as<float>(), problem);
  problem.dq = dq.as<float>();
  problem.order = order.as<int32_t>();
  problem.next = order.as<int32_t>() + args.sequences;
  problem.most_tiles = static_cast<int32_t>(most_tiles);
  launch_early(stream, statistics_kernel, grid_of(query_tiles, ceil_div(2 * query_rows * heads, 256)), dim3(256), 0, args,
               query_tiles, statistics.as<float>(), order.as<int32_t>(), problem.next);
  launch_early(stream, backward_kernel, grid_of(blocks), dim3(backward_threads), shared_bytes, problem);
}

}  // namespace mimo::cuda
