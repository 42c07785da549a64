// Attention forward on Hopper for head dimension 80, full attention within each packed sequence: o = softmax(scale q
// kᵀ) v over tiles of keys with online softmax (Dao et al., FlashAttention-2; Shah et al., FlashAttention-3).
//
// A block computes 192 queries of a head: three consumer warpgroups of 64 queries each and a TMA producer warpgroup.
// The consumers are not synchronised with each other: the exponentials of one overlap the wgmma of the others, and
// within a warpgroup p v of a tile overlaps the exponentials of the next tile. Key tiles are processed from last to
// first, because only the last can be partial.
#include "sm90_attention.h"
#include "sm90_attention_forward.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

constexpr int warpgroups = 3, query_rows = 64 * warpgroups, key_rows = score_columns;
constexpr int head_steps = head_dim / 16, key_steps = key_rows / 16;
constexpr int query_bytes = head_tile_bytes(query_rows), key_bytes = head_tile_bytes(key_rows);
constexpr int stages = 2, threads = 128 * (warpgroups + 1);
/// setmaxnreg, of 64 Ki registers: 128 producer threads keep 32, 384 consumer threads get 160.
constexpr int fetch_registers = 32, main_registers = 160;

struct Shared {
  char query[query_bytes];
  char key[stages][key_bytes], value[stages][key_bytes];
  uint64_t query_full, key_full[stages], key_empty[stages], value_full[stages], value_empty[stages];
};
constexpr int64_t shared_bytes = 1024 + sizeof(Shared);

struct Problem {
  CUtensorMap q, k, v;
  mimo_attention_forward_args args;
};

__device__ __forceinline__ void fetch(const Problem& problem, const Piece& piece, int head, int tiles, Shared& shared) {
  const int first = static_cast<int>(piece.first), last = static_cast<int>(piece.last);
  arrive_expecting(&shared.query_full, query_bytes);
  copy_head(shared.query, problem.q, query_rows, head, static_cast<int>(piece.index) * query_rows, first, last,
            &shared.query_full);
  for (int i = 0; i < tiles; ++i) {
    const int slot = i % stages, row = (tiles - 1 - i) * key_rows;
    const uint32_t parity = (i / stages & 1) ^ 1;
    wait(&shared.key_empty[slot], parity);
    arrive_expecting(&shared.key_full[slot], key_bytes);
    copy_head(shared.key[slot], problem.k, key_rows, head, row, first, last, &shared.key_full[slot]);
    wait(&shared.value_empty[slot], parity);
    arrive_expecting(&shared.value_full[slot], key_bytes);
    copy_head(shared.value[slot], problem.v, key_rows, head, row, first, last, &shared.value_full[slot]);
  }
}

__device__ __forceinline__ void multiply_queries(const Problem& problem, const Piece& piece, int head, int tiles,
                                                 Shared& shared, int own) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool signals = lane == 0;
  const char* const query = shared.query + own * 64 * tile_row_bytes;
  Softmax softmax{problem.args.softmax_scale * log2_e};
  float o[head_sums];
  uint32_t packed[key_rows / 4];

  const auto start_scores = [&](float (&s)[key_rows / 2], int i) {
    const int slot = i % stages;
    wait(&shared.key_full[slot], i / stages & 1);
    begin_products();
#pragma unroll
    for (int k = 0; k < head_steps; ++k) {
      multiply_64x112(s, head_along_k(query, query_rows, k), head_along_k(shared.key[slot], key_rows, k), k > 0);
    }
    commit_products();
  };
  const auto start_values = [&](int i) {
    const int slot = i % stages;
    wait(&shared.value_full[slot], i / stages & 1);
    begin_products();
#pragma unroll
    for (int k = 0; k < key_steps; ++k) {
      multiply_64x80(o, packed + 4 * k, head_along_columns(shared.value[slot], key_rows, k), i > 0 || k > 0);
    }
    commit_products();
  };

  wait(&shared.query_full, 0);
  {
    float s[key_rows / 2], weight[key_rows / 2];
    start_scores(s, 0);
    wait_products<0>();
    settle(s);
    if (signals) arrive(&shared.key_empty[0]);
    hide_keys(s, static_cast<int>(piece.last - piece.first) - (tiles - 1) * key_rows);
    softmax.weigh(s, weight);
    pack_weights(weight, packed);
  }
  for (int i = 1; i < tiles; ++i) {
    float s[key_rows / 2], weight[key_rows / 2];
    start_scores(s, i);
    start_values(i - 1);
    wait_products<1>();
    settle(s);
    if (signals) arrive(&shared.key_empty[i % stages]);
    softmax.weigh(s, weight);
    wait_products<0>();
    settle(o);
    if (signals) arrive(&shared.value_empty[(i - 1) % stages]);
    softmax.rescale(o);
    pack_weights(weight, packed);
  }
  start_values(tiles - 1);
  wait_products<0>();
  settle(o);

  const int64_t heads = problem.args.query_heads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = row_sum(softmax.sum[half]), factor = 1 / sum;
    const int row = own * 64 + warp * 16 + lane / 4 + 8 * half;
    if (row >= piece.count) continue;
    const int64_t at = (piece.begin + row) * heads + head;
    bf16* const to = static_cast<bf16*>(problem.args.o) + at * head_dim + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < head_dim / 8; ++j) {
      *reinterpret_cast<uint32_t*>(to + 8 * j) = pack_bf16(factor * o[4 * j + 2 * half], factor * o[4 * j + 2 * half + 1]);
    }
    if (lane % 4 == 0) problem.args.lse[at] = (softmax.maximum[half] + log2f(sum)) * ln_2;
  }
}

__global__ void __launch_bounds__(threads, 1) forward_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  const mimo_attention_forward_args& args = problem.args;
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, query_rows, blockIdx.x);
  if (piece.count == 0) return;
  extern __shared__ char unaligned[];
  Shared& shared = *reinterpret_cast<Shared*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  if (threadIdx.x == 0) {
    initialise(&shared.query_full, 1);
    for (int i = 0; i < stages; ++i) {
      initialise(&shared.key_full[i], 1), initialise(&shared.value_full[i], 1);
      initialise(&shared.key_empty[i], 4 * warpgroups), initialise(&shared.value_empty[i], 4 * warpgroups);
    }
    publish_barriers();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0), head = blockIdx.y;
  const int tiles = static_cast<int>((piece.last - piece.first + key_rows - 1) / key_rows);
  if (warpgroup == 0) {
    shrink_registers<fetch_registers>();
    if (threadIdx.x == 0) fetch(problem, piece, head, tiles, shared);
  } else {
    grow_registers<main_registers>();
    multiply_queries(problem, piece, head, tiles, shared, warpgroup - 1);
  }
#endif
}

}  // namespace

void sm90_bf16_attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args) {
  const int64_t heads = args.query_heads;
  Problem problem;
  problem.q = heads_map(args.q, heads, head_dim, args.group_stride, args.token_stride, query_rows);
  problem.k = heads_map(args.k, heads, head_dim, args.group_stride, args.token_stride, key_rows);
  problem.v = heads_map(args.v, heads, head_dim, args.group_stride, args.token_stride, key_rows);
  problem.args = args;
  launch(stream, forward_kernel, grid_of(piece_count(args.tokens, args.sequences, query_rows), heads), dim3(threads),
         shared_bytes, problem);
}

}  // namespace mimo::cuda
