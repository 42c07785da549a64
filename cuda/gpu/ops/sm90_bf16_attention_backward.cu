// Attention backward on Hopper: heads of 80, full attention within each packed sequence (Dao et al., FlashAttention-2,
// algorithm 2; Shah et al., FlashAttention-3, for the division of labour).
//
//   p = exp(scale q kᵀ - lse)   dv = pᵀ do   dp = do vᵀ   ds = p (dp - Σ_i do_i o_i)   dq = scale ds k   dk = scale dsᵀ q
//
// A block owns 128 keys of a head and walks the sequence's queries, 64 at a time. Two warpgroups have 64 keys each: they
// compute sᵀ and dpᵀ with keys as rows, so that pᵀ and dsᵀ are in registers already what the products for dv and dk want on
// their left, and leave dsᵀ in shared memory too. A third warpgroup multiplies that with the keys: dq of 64 queries, summed
// over the block's keys. The fourth has a warp that fetches and warps that add dq to the sums of all blocks.
//
// Those sums are added in a fixed order, that of the keys: a block adds to a tile of queries after the block before it
// has. Blocks take their numbers when they start, and a block waits for lower numbers alone: there is always a block
// that does not wait. Heads alternate from block to block, so that of the blocks that run at a time few belong to one
// head; these start one after the other, two microseconds apart, and do not hold each other up from then on.
#include "kernel.cuh"
#include "sm90_attention.cuh"
#include "sm90_attention.h"

namespace mimo::cuda {
namespace {

using namespace sm90;

constexpr int query_rows = 64, key_rows = 128;
constexpr int query_steps = query_rows / 16, key_steps = key_rows / 16, head_steps = head_dim / 16;
constexpr int query_bytes = head_tile_bytes(query_rows), key_bytes = head_tile_bytes(key_rows);
constexpr int ds_bytes = key_rows * tile_row_bytes;
constexpr int dq_floats = query_rows * head_dim, dq_bytes = dq_floats * 4;
constexpr int statistics_floats = 2 * query_rows, statistics_bytes = statistics_floats * 4;
constexpr int stages = 2, ds_buffers = 2, adders = 2;
constexpr int stage_bytes = 2 * query_bytes;
constexpr int main_warps = 8, threads = 4 * 128;
/// Of 64 Ki: 128 threads keep 24, 128 have 72, 256 get 208.
constexpr int service_registers = 24, dq_registers = 72, main_registers = 208;

struct Barriers {
  uint64_t keys;
  uint64_t full[stages], empty[stages];
  uint64_t ds_full[ds_buffers], ds_empty[ds_buffers];
  uint64_t dq_full[adders], dq_empty[adders];
  int32_t number;
};
struct Shared {
  char key[key_bytes], value[key_bytes];
  char stage[stages][stage_bytes];  // queries, then do
  char ds[ds_buffers][ds_bytes];    // [key][query]
  float dq[adders][dq_floats];      // float4 j of thread t at j * 128 + t
  float statistics[stages][statistics_floats];
  Barriers barriers;
};
constexpr int64_t shared_bytes = 1024 + sizeof(Shared);

struct Problem {
  CUtensorMap q, k, v, d_o;
  mimo_attention_backward_args args;
  const float* statistics;  // [head][tile of queries][lse log2 e, Σ do o][64]
  float* dq;                // [head][tile of queries], each as Shared::dq has it
  int32_t* added;           // [head][tile of queries]: blocks that have added
  int32_t* numbers;         // the next block's
  int32_t query_tiles;      // piece_count
};

/// The part of the work that a block has.
struct Work {
  int head, sequence_tile, first, last;  // sequence_tile: its number among the sequence's keys
  int key_count, query_tiles, tile;      // tile: first of the sequence's in the arrays above
};

// ---- the fourth warpgroup --------------------------------------------------------------------------------------

__device__ __forceinline__ void fetch(const Problem& problem, const Work& work, Shared& shared) {
  Barriers& barriers = shared.barriers;
  const int key = work.sequence_tile * key_rows;
  arrive_expecting(&barriers.keys, 2 * key_bytes);
  copy_head(shared.key, problem.k, key_rows, work.head, key, work.first, work.last, &barriers.keys);
  copy_head(shared.value, problem.v, key_rows, work.head, key, work.first, work.last, &barriers.keys);
  const float* statistics =
      problem.statistics + (static_cast<int64_t>(work.head) * problem.query_tiles + work.tile) * statistics_floats;
  for (int i = 0; i < work.query_tiles; ++i) {
    const int slot = i % stages;
    uint64_t* const full = &barriers.full[slot];
    wait(&barriers.empty[slot], (i / stages & 1) ^ 1);
    arrive_expecting(full, stage_bytes + statistics_bytes);
    copy_head(shared.stage[slot], problem.q, query_rows, work.head, i * query_rows, work.first, work.last, full);
    copy_head(shared.stage[slot] + query_bytes, problem.d_o, query_rows, work.head, i * query_rows, work.first, work.last,
              full);
    copy_bytes(shared.statistics[slot], statistics + i * statistics_floats, statistics_bytes, full);
  }
}

/// Adds every `adders`-th tile of dq from `own` on.
__device__ __forceinline__ void add_dq(const Problem& problem, const Work& work, Shared& shared, int own) {
  Barriers& barriers = shared.barriers;
  const int64_t first = static_cast<int64_t>(work.head) * problem.query_tiles + work.tile;
  for (int i = own; i < work.query_tiles; i += adders) {
    wait(&barriers.dq_full[own], i / adders & 1);
    float* const to = problem.dq + (first + i) * dq_floats;
    int32_t* const added = problem.added + first + i;
    if (work.sequence_tile == 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                   "r"(shared_address(shared.dq[own])), "r"(dq_bytes)
                   : "memory");
    } else {
      int32_t count;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(added) : "memory");
      } while (count != work.sequence_tile);
      asm volatile("fence.proxy.async;" ::: "memory");
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                   "r"(shared_address(shared.dq[own])), "r"(dq_bytes)
                   : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    arrive(&barriers.dq_empty[own]);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(added), "r"(work.sequence_tile + 1) : "memory");
  }
}

// ---- the third -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void multiply_dq(const Work& work, Shared& shared) {
  Barriers& barriers = shared.barriers;
  const int thread = threadIdx.x % 128;
  const bool signals = thread % 32 == 0;
  wait(&barriers.keys, 0);
  for (int i = 0; i < work.query_tiles; ++i) {
    float sum[head_sums];
    const int buffer = i % ds_buffers, adder = i % adders;
    wait(&barriers.ds_full[buffer], i / ds_buffers & 1);
    begin_products();
#pragma unroll
    for (int k = 0; k < key_steps; ++k) {
      multiply_64x80(sum, operand(shared.ds[buffer], true, 0) + k * operand_step<true>,
                     head_along_columns(shared.key, key_rows, k), k > 0);
    }
    commit_products();
    wait_products<0>();
    settle(sum);
    if (signals) arrive(&barriers.ds_empty[buffer]);
    wait(&barriers.dq_empty[adder], (i / adders & 1) ^ 1);
    float4* const to = reinterpret_cast<float4*>(shared.dq[adder]) + thread;
#pragma unroll
    for (int j = 0; j < head_sums / 4; ++j) {
      to[j * 128] = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
    }
    publish_stores();
    __syncwarp();
    if (signals) arrive(&barriers.dq_full[adder]);
  }
}

// ---- the first two ---------------------------------------------------------------------------------------------

/// Stores this thread's part of [64, 80] times `factor` in rows of a token each.
__device__ __forceinline__ void store_gradient(const float (&sum)[head_sums], float factor, bf16* to, int64_t stride, int row,
                                               int count) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= count) continue;
    bf16* const at = to + (row + 8 * half) * stride + column;
#pragma unroll
    for (int j = 0; j < head_dim / 8; ++j) {
      *reinterpret_cast<uint32_t*>(at + 8 * j) =
          pack_bf16(factor * sum[4 * j + 2 * half], factor * sum[4 * j + 2 * half + 1]);
    }
  }
}

__device__ __forceinline__ void multiply_keys(const Problem& problem, const Work& work, Shared& shared, int own) {
  Barriers& barriers = shared.barriers;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool signals = lane == 0, cut = work.key_count < key_rows;
  const int row = own * 64 + warp * 16 + lane / 4;  // and row + 8
  const float scale = problem.args.softmax_scale, scale_log2 = scale * log2_e;
  // Where this lane stores a row of eight of dsᵀ: 16 keys of the warp, 16 queries a step.
  const int ds_row = own * 64 + warp * 16 + lane % 16, ds_chunk = lane / 16;

  wait(&barriers.keys, 0);
  const char* const own_key = shared.key + own * 64 * tile_row_bytes;
  const char* const own_value = shared.value + own * 64 * tile_row_bytes;

  float dk[head_sums], dv[head_sums];
  for (int i = 0; i < work.query_tiles; ++i) {
    const int slot = i % stages, buffer = i % ds_buffers;
    const char* const query = shared.stage[slot];
    const char* const d_o = query + query_bytes;
    wait(&barriers.full[slot], i / stages & 1);
    float s[query_rows / 2], dp[query_rows / 2], p[query_rows / 2];
    uint32_t p_packed[query_rows / 4], ds_packed[query_rows / 4];
    begin_products();
#pragma unroll
    for (int k = 0; k < head_steps; ++k) {
      multiply_64x64(s, head_along_k(own_key, key_rows, k), head_along_k(query, query_rows, k), k > 0);
    }
    commit_products();
#pragma unroll
    for (int k = 0; k < head_steps; ++k) {
      multiply_64x64(dp, head_along_k(own_value, key_rows, k), head_along_k(d_o, query_rows, k), k > 0);
    }
    commit_products();
    wait_products<1>();
    settle(s);
    // dk of the tile before is through as well: its stage is free. Every lane says so, for it has read statistics there.
    if (i > 0) arrive(&barriers.empty[(i - 1) % stages]);
    const float2* const lse = reinterpret_cast<const float2*>(shared.statistics[slot]) + lane % 4;
#pragma unroll
    for (int j = 0; j < query_rows / 8; ++j) {
      const float2 l = lse[4 * j];
      p[4 * j] = exp2_fast(s[4 * j] * scale_log2 - l.x);
      p[4 * j + 1] = exp2_fast(s[4 * j + 1] * scale_log2 - l.y);
      p[4 * j + 2] = exp2_fast(s[4 * j + 2] * scale_log2 - l.x);
      p[4 * j + 3] = exp2_fast(s[4 * j + 3] * scale_log2 - l.y);
      p_packed[2 * j] = pack_bf16(p[4 * j], p[4 * j + 1]);
      p_packed[2 * j + 1] = pack_bf16(p[4 * j + 2], p[4 * j + 3]);
    }
    begin_products();
#pragma unroll
    for (int k = 0; k < query_steps; ++k) {
      multiply_64x80(dv, p_packed + 4 * k, head_along_columns(d_o, query_rows, k), i > 0 || k > 0);
    }
    commit_products();
    wait_products<1>();
    settle(dp);
    const float2* const dot = lse + query_rows / 2;
#pragma unroll
    for (int j = 0; j < query_rows / 8; ++j) {
      const float2 d = dot[4 * j];
      ds_packed[2 * j] = pack_bf16(p[4 * j] * (dp[4 * j] - d.x), p[4 * j + 1] * (dp[4 * j + 1] - d.y));
      ds_packed[2 * j + 1] = pack_bf16(p[4 * j + 2] * (dp[4 * j + 2] - d.x), p[4 * j + 3] * (dp[4 * j + 3] - d.y));
    }
    // Rows behind the sequence have scores of 0, whatever that gives: dq must not see them.
    if (cut) {
#pragma unroll
      for (int j = 0; j < query_rows / 8; ++j) {
        if (row >= work.key_count) ds_packed[2 * j] = 0;
        if (row + 8 >= work.key_count) ds_packed[2 * j + 1] = 0;
      }
    }
    wait(&barriers.ds_empty[buffer], (i / ds_buffers & 1) ^ 1);
#pragma unroll
    for (int k = 0; k < query_steps; ++k) {
      store_matrices(shared.ds[buffer] + tile_offset(ds_row, 2 * k + ds_chunk), ds_packed + 4 * k);
    }
    publish_stores();
    __syncwarp();
    if (signals) arrive(&barriers.ds_full[buffer]);
    begin_products();
#pragma unroll
    for (int k = 0; k < query_steps; ++k) {
      multiply_64x80(dk, ds_packed + 4 * k, head_along_columns(query, query_rows, k), i > 0 || k > 0);
    }
    commit_products();
  }
  wait_products<0>();
  settle(dk);
  settle(dv);
  const int64_t stride = problem.args.d_token_stride;
  const int64_t to = (work.first + static_cast<int64_t>(work.sequence_tile) * key_rows) * stride +
                     work.head * problem.args.group_stride;
  store_gradient(dk, scale, static_cast<bf16*>(problem.args.dk) + to, stride, row, work.key_count);
  store_gradient(dv, 1, static_cast<bf16*>(problem.args.dv) + to, stride, row, work.key_count);
}

// ---- kernels ---------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(threads, 1) backward_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  Shared& shared = *reinterpret_cast<Shared*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  Barriers& barriers = shared.barriers;
  if (threadIdx.x == 0) {
    barriers.number = atomicAdd(problem.numbers, 1);
    initialise(&barriers.keys, 1);
    for (int i = 0; i < stages; ++i) initialise(&barriers.full[i], 1), initialise(&barriers.empty[i], 32 * main_warps);
    for (int i = 0; i < ds_buffers; ++i) {
      initialise(&barriers.ds_full[i], main_warps);
      initialise(&barriers.ds_empty[i], 4);
    }
    for (int i = 0; i < adders; ++i) initialise(&barriers.dq_full[i], 4), initialise(&barriers.dq_empty[i], 1);
    publish_barriers();
  }
  __syncthreads();
  const mimo_attention_backward_args& args = problem.args;
  const int number = barriers.number, heads = static_cast<int>(args.query_heads);
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, key_rows, number / heads);
  if (piece.count == 0) return;
  Work work;
  work.head = number % heads;
  work.sequence_tile = static_cast<int>(piece.index);
  work.first = static_cast<int>(piece.first), work.last = static_cast<int>(piece.last);
  work.key_count = static_cast<int>(piece.count);
  work.query_tiles = (work.last - work.first + query_rows - 1) / query_rows;
  work.tile = static_cast<int>(first_piece(args.cu_seqlens, piece.sequence, query_rows));

  const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    shrink_registers<service_registers>();
    if (threadIdx.x == 0) {
      fetch(problem, work, shared);
    } else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= adders) {
      add_dq(problem, work, shared, threadIdx.x / 32 - 1);
    }
  } else if (warpgroup == 1) {
    shrink_registers<dq_registers>();
    multiply_dq(work, shared);
  } else {
    grow_registers<main_registers>();
    multiply_keys(problem, work, shared, warpgroup - 2);
  }
#endif
}

/// lse log2 e and Σ_i do_i o_i of every query, tile by tile; two threads a query. Rows behind a sequence: p becomes 0.
__global__ void __launch_bounds__(256) statistics_kernel(mimo_attention_backward_args args, int64_t query_tiles, float* to) {
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, query_rows, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t index = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, pair = index / 2;
  const int64_t heads = args.query_heads, head = pair % heads, row = pair / heads;
  const bool exists = row < query_rows, live = row < piece.count;
  float sum = 0;
  if (live) {
    const int64_t token = piece.begin + row, offset = head * head_dim + index % 2 * (head_dim / 2);
    const bf16* const d_o = static_cast<const bf16*>(args.d_o) + token * args.d_o_stride + offset;
    const bf16* const o = static_cast<const bf16*>(args.o) + token * heads * head_dim + offset;
#pragma unroll
    for (int i = 0; i < head_dim / 2; i += 8) {
      float a[8], b[8];
      read(d_o + i, a);
      read(o + i, b);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += a[j] * b[j];
    }
  }
  sum += __shfl_xor_sync(all_lanes, sum, 1);
  if (!exists || index % 2 != 0) return;
  float* const at = to + (head * query_tiles + blockIdx.x) * statistics_floats + row;
  at[0] = live ? args.lse[(piece.begin + row) * heads + head] * log2_e : INFINITY;
  at[query_rows] = sum;
}

/// dq in bf16 from the sums; a thread has 8 columns of two rows.
__global__ void __launch_bounds__(320) dq_kernel(mimo_attention_backward_args args, int64_t query_tiles, const float* sums) {
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, query_rows, blockIdx.x);
  if (piece.count == 0) return;
  const int j = threadIdx.x % (head_dim / 8), pair = threadIdx.x / (head_dim / 8), row = pair / 8 * 16 + pair % 8;
  const float* const from = sums + (static_cast<int64_t>(blockIdx.y) * query_tiles + blockIdx.x) * dq_floats +
                            (j * 128 + pair / 8 * 32 + pair % 8 * 4) * 4;
  float upper[8], lower[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float part[4];
    read(from + 4 * i, part);
    upper[2 * i] = args.softmax_scale * part[0], upper[2 * i + 1] = args.softmax_scale * part[1];
    lower[2 * i] = args.softmax_scale * part[2], lower[2 * i + 1] = args.softmax_scale * part[3];
  }
  bf16* const to = static_cast<bf16*>(args.dq) + (piece.begin + row) * args.d_token_stride +
                   static_cast<int64_t>(blockIdx.y) * args.group_stride + j * 8;
  if (row < piece.count) write(to, upper);
  if (row + 8 < piece.count) write(to + 8 * args.d_token_stride, lower);
}

}  // namespace

void sm90_bf16_attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args) {
  const int64_t heads = args.query_heads, query_tiles = piece_count(args.tokens, args.sequences, query_rows);
  const int64_t key_tiles = piece_count(args.tokens, args.sequences, key_rows);
  Workspace statistics(&stream, heads * query_tiles * statistics_bytes), dq(&stream, heads * query_tiles * dq_bytes);
  const int64_t counters_bytes = (heads * query_tiles + 1) * 4;
  Workspace counters(&stream, counters_bytes);
  check(cudaMemsetAsync(counters.as<void>(), 0, static_cast<size_t>(counters_bytes), stream.handle()), "clearing counters");
  Problem problem;
  problem.q = heads_map(args.q, heads, head_dim, args.group_stride, args.token_stride, query_rows);
  problem.k = heads_map(args.k, heads, head_dim, args.group_stride, args.token_stride, key_rows);
  problem.v = heads_map(args.v, heads, head_dim, args.group_stride, args.token_stride, key_rows);
  problem.d_o = heads_map(args.d_o, heads, head_dim, head_dim, args.d_o_stride, query_rows);
  problem.args = args;
  problem.statistics = statistics.as<float>();
  problem.dq = dq.as<float>();
  problem.numbers = counters.as<int32_t>();
  problem.added = problem.numbers + 1;
  problem.query_tiles = static_cast<int32_t>(query_tiles);
  launch(stream, statistics_kernel, grid_of(query_tiles, ceil_div(2 * query_rows * heads, 256)), dim3(256), 0, args,
         query_tiles, statistics.as<float>());
  launch(stream, backward_kernel, grid_of(key_tiles * heads), dim3(threads), shared_bytes, problem);
  launch(stream, dq_kernel, grid_of(query_tiles, heads), dim3(320), 0, args, query_tiles, dq.as<float>());
}

}  // namespace mimo::cuda
