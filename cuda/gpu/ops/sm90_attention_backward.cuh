// Shared by Hopper's attention backward kernels: the per-query statistics, and the wgmma loop of a consumer warpgroup
// over 64 keys and all queries of a sequence. A kernel's Shared has `stages` (their number), stage, ds, statistics, and
// the barriers full, empty, ds_full and ds_empty.
#pragma once
#include "early.cuh"
#include "sm90_attention.cuh"

namespace mimo::cuda::sm90 {

constexpr int query_rows = 64, key_rows = 128;
constexpr int query_steps = query_rows / 16, key_steps = key_rows / 16, head_steps = head_dim / 16;
constexpr int query_bytes = head_tile_bytes(query_rows), key_bytes = head_tile_bytes(key_rows);
constexpr int ds_bytes = key_rows * tile_row_bytes;
constexpr int dq_floats = query_rows * head_dim, dq_bytes = dq_floats * 4;
constexpr int statistics_floats = 2 * query_rows, statistics_bytes = statistics_floats * 4;
constexpr int ds_buffers = 2;
constexpr int stage_bytes = 2 * query_bytes;  // q, then do
constexpr int main_warps = 8, dq_warps = 4, backward_threads = 4 * 128;
/// setmaxnreg, of 64 Ki registers: 128 producer threads keep 24, 128 dq threads 72, 256 key threads get 208.
constexpr int service_registers = 24, dq_registers = 72, main_registers = 208;

/// Kernel parameters that both kernels have.
struct BackwardProblem {
  CUtensorMap q, k, v, d_o;
  mimo_attention_backward_args args;
  const float* statistics;  // [head][query tile][lse log2 e, Σ do o][64]
  int32_t query_tiles;      // piece_count
};

inline void describe(const mimo_attention_backward_args& args, const float* statistics, BackwardProblem& problem) {
  const int64_t heads = args.query_heads;
  problem.q = heads_map(args.q, heads, head_dim, args.group_stride, args.token_stride, query_rows);
  problem.k = heads_map(args.k, heads, head_dim, args.group_stride, args.token_stride, key_rows);
  problem.v = heads_map(args.v, heads, head_dim, args.group_stride, args.token_stride, key_rows);
  problem.d_o = heads_map(args.d_o, heads, head_dim, head_dim, args.d_o_stride, query_rows);
  problem.args = args;
  problem.statistics = statistics;
  problem.query_tiles = static_cast<int32_t>(piece_count(args.tokens, args.sequences, query_rows));
}

/// Statistics of a head's queries from query tile `tile` on.
__device__ __forceinline__ const float* statistics_of(const BackwardProblem& problem, int head, int tile) {
  return problem.statistics + (static_cast<int64_t>(head) * problem.query_tiles + tile) * statistics_floats;
}

template <class Barriers>
__device__ __forceinline__ void initialise_stages(Barriers& barriers) {
  for (uint64_t& full : barriers.full) initialise(&full, 1);
  for (uint64_t& empty : barriers.empty) initialise(&empty, 32 * main_warps);
  for (int i = 0; i < ds_buffers; ++i) {
    initialise(&barriers.ds_full[i], main_warps);
    initialise(&barriers.ds_empty[i], dq_warps);
  }
}

// ---- statistics ------------------------------------------------------------------------------------------------

/// piece_at by a whole warp: a 32-way search over the sequences.
__device__ __forceinline__ Piece find_piece(const int32_t* cu_seqlens, int64_t sequences, int64_t size, int64_t number) {
  const int lane = threadIdx.x % 32;
  int low = 0, count = static_cast<int>(sequences);
  while (count > 1) {
    const int step = (count + 31) / 32, at = lane * step;
    const bool before = at < count && first_piece(cu_seqlens, low + at, size) <= number;
    const int last = __popc(__ballot_sync(all_lanes, before)) - 1;
    low += last * step;
    count = min(step, count - last * step);
  }
  Piece piece;
  piece.sequence = low;
  piece.first = cu_seqlens[low], piece.last = cu_seqlens[low + 1];
  piece.index = number - (piece.first / size + low);
  piece.begin = piece.first + piece.index * size;
  piece.count = piece.begin < piece.last ? smaller(size, piece.last - piece.begin) : 0;
  return piece;
}

/// Writes lse log2 e and Σ_i do_i o_i of a tile's queries to [head][query tile][2][64]; two threads a query. Rows past
/// the sequence's end get lse = ∞, so that p is 0.
__device__ __forceinline__ void write_statistics(const mimo_attention_backward_args& args, const Piece& piece,
                                                 int64_t query_tiles, float* to) {
  const int index = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x), pair = index / 2;
  const int heads = static_cast<int>(args.query_heads), head = pair % heads, row = pair / heads;
  const bool exists = row < query_rows, live = row < piece.count;
  constexpr int pieces = head_dim / 2 / 8;
  uint4 a[pieces], b[pieces];
#pragma unroll
  for (int i = 0; i < pieces; ++i) a[i] = b[i] = make_uint4(0, 0, 0, 0);
  const int64_t token = piece.begin + row;
  float lse = INFINITY;
  if (live) {
    const int64_t offset = head * head_dim + index % 2 * (head_dim / 2);
    const uint4* const d_o = reinterpret_cast<const uint4*>(static_cast<const bf16*>(args.d_o) + token * args.d_o_stride + offset);
    const uint4* const o = reinterpret_cast<const uint4*>(static_cast<const bf16*>(args.o) + token * heads * head_dim + offset);
#pragma unroll
    for (int i = 0; i < pieces; ++i) a[i] = d_o[i], b[i] = o[i];
    lse = args.lse[token * heads + head] * log2_e;
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < pieces; ++i) {
    const uint32_t left[4] = {a[i].x, a[i].y, a[i].z, a[i].w}, right[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum += lower_bf16(left[j]) * lower_bf16(right[j]);
      sum += upper_bf16(left[j]) * upper_bf16(right[j]);
    }
  }
  sum += __shfl_xor_sync(all_lanes, sum, 1);
  if (!exists || index % 2 != 0) return;
  float* const at = to + (head * query_tiles + blockIdx.x) * statistics_floats + row;
  at[0] = lse;
  at[query_rows] = sum;
}

/// Starts the TMA loads of q, do and statistics of query tile `i` of a sequence into a stage.
__device__ __forceinline__ void copy_queries(char* stage, float* to, const CUtensorMap& q, const CUtensorMap& d_o,
                                             const float* statistics, int i, int head, int first, int last,
                                             uint64_t* full) {
  arrive_expecting(full, stage_bytes + statistics_bytes);
  copy_head(stage, q, query_rows, head, i * query_rows, first, last, full);
  copy_head(stage + query_bytes, d_o, query_rows, head, i * query_rows, first, last, full);
  copy_bytes(to, statistics + i * statistics_floats, statistics_bytes, full);
}

// ---- consumer warpgroups ---------------------------------------------------------------------------------------

/// Assigns roles: calls serve() (producer), multiply_dq() and, in two warpgroups, multiply_keys(own). Both
/// multiply_keys must await and pass the same number of turns; `own` 0 goes first.
template <class Serve, class MultiplyDq, class MultiplyKeys>
__device__ __forceinline__ void divide_labour(Serve&& serve, MultiplyDq&& multiply_dq, MultiplyKeys&& multiply_keys) {
  const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0), own = warpgroup - 2;
  if (warpgroup == 0) {
    shrink_registers<service_registers>();
    serve();
  } else if (warpgroup == 1) {
    shrink_registers<dq_registers>();
    multiply_dq();
  } else {
    grow_registers<main_registers>();
    if (own == 1) pass_turn(own);
    multiply_keys(own);
    if (own == 0) await_turn(own);
  }
}

/// sum (+)= dsᵀ k for 64 queries and 128 keys; complete on return.
__device__ __forceinline__ void multiply_ds_with_keys(float (&sum)[head_sums], const char* ds, const char* key, bool add) {
  begin_products();
#pragma unroll
  for (int k = 0; k < key_steps; ++k) {
    multiply_64x80(sum, operand(ds, true, 0) + k * operand_step<true>, head_along_columns(key, key_rows, k), add || k > 0);
  }
  commit_products();
  wait_products<0>();
  settle(sum);
}

/// dk (without the scale) and dv of the 64 keys of warpgroup `own`, over all queries; ds is left in shared memory, tile
/// by tile, for dq. `key`: the warpgroup's rows of k; value(s): descriptor of its v, k-step s of 5; key_count: valid
/// keys of the piece; step: running number of query tiles. Calls starts(i) before query tile i, has_scores(i) once its
/// scores and has_products(i) once dp are complete. Awaits and passes one turn a tile.
template <class Shared, class Value, class Starts, class HasScores, class HasProducts>
__device__ __forceinline__ void multiply_keys_with_queries(Shared& shared, const char* key, Value&& value, int own,
                                                           int key_count, int query_tiles, float scale_log2, int& step,
                                                           float (&dk)[head_sums], float (&dv)[head_sums], Starts&& starts,
                                                           HasScores&& has_scores, HasProducts&& has_products) {
  constexpr int stages = Shared::stages;
  auto& barriers = shared.barriers;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool signals = lane == 0, cut = key_count < key_rows;
  const int row = own * 64 + warp * 16 + lane / 4;  // and row + 8
  // Where this lane stores its 8-element rows of dsᵀ: 16 keys of the warp x 16 queries a step.
  const int ds_row = own * 64 + warp * 16 + lane % 16, ds_chunk = lane / 16;
  for (int i = 0; i < query_tiles; ++i, ++step) {
    const int slot = step % stages, buffer = step % ds_buffers;
    const char* const query = shared.stage[slot];
    const char* const d_o = query + query_bytes;
    starts(i);
    wait(&barriers.full[slot], step / stages & 1);
    float s[query_rows / 2], dp[query_rows / 2], p[query_rows / 2];
    uint32_t p_packed[query_rows / 4], ds_packed[query_rows / 4];
    begin_products();
#pragma unroll
    for (int k = 0; k < head_steps; ++k) {
      multiply_64x64(s, head_along_k(key, key_rows, k), head_along_k(query, query_rows, k), k > 0);
    }
    commit_products();
#pragma unroll
    for (int k = 0; k < head_steps; ++k) {
      multiply_64x64(dp, value(k), head_along_k(d_o, query_rows, k), k > 0);
    }
    commit_products();
    wait_products<1>();
    settle(s);
    has_scores(i);
    // dk of the previous tile is complete, so its stage is free. Every lane arrives: each has read statistics there.
    if (i > 0) arrive(&barriers.empty[(step - 1) % stages]);
    const float2* const lse = reinterpret_cast<const float2*>(shared.statistics[slot]) + lane % 4;
    await_turn(own);
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
    pass_turn(own);
    begin_products();
#pragma unroll
    for (int k = 0; k < query_steps; ++k) {
      multiply_64x80(dv, p_packed + 4 * k, head_along_columns(d_o, query_rows, k), i > 0 || k > 0);
    }
    commit_products();
    wait_products<1>();
    settle(dp);
    has_products(i);
    const float2* const dot = lse + query_rows / 2;
#pragma unroll
    for (int j = 0; j < query_rows / 8; ++j) {
      const float2 d = dot[4 * j];
      ds_packed[2 * j] = pack_bf16(p[4 * j] * (dp[4 * j] - d.x), p[4 * j + 1] * (dp[4 * j + 1] - d.y));
      ds_packed[2 * j + 1] = pack_bf16(p[4 * j + 2] * (dp[4 * j + 2] - d.x), p[4 * j + 3] * (dp[4 * j + 3] - d.y));
    }
    // Keys past the sequence's end have scores of 0 and so an arbitrary p; ds is cleared to keep them out of dq.
    if (cut) {
#pragma unroll
      for (int j = 0; j < query_rows / 8; ++j) {
        if (row >= key_count) ds_packed[2 * j] = 0;
        if (row + 8 >= key_count) ds_packed[2 * j + 1] = 0;
      }
    }
    begin_products();
#pragma unroll
    for (int k = 0; k < query_steps; ++k) {
      multiply_64x80(dk, ds_packed + 4 * k, head_along_columns(query, query_rows, k), i > 0 || k > 0);
    }
    commit_products();
    wait(&barriers.ds_empty[buffer], (step / ds_buffers & 1) ^ 1);
#pragma unroll
    for (int k = 0; k < query_steps; ++k) {
      store_matrices(shared.ds[buffer] + tile_offset(ds_row, 2 * k + ds_chunk), ds_packed + 4 * k);
    }
    publish_stores();
    __syncwarp();
    if (signals) arrive(&barriers.ds_full[buffer]);
  }
  wait_products<0>();
  settle(dk);
  settle(dv);
  arrive(&barriers.empty[(step - 1) % stages]);
}

}  // namespace mimo::cuda::sm90
