// Forward of the Mamba-2 chunk scan (SSD) on Hopper (docs/spec/language-model.md §2.3), given the states H_c:
//
//   y_i = exp(cs_i) H_c C_i + Σ_{j<=i} (C_i · B_j) exp(cs_i - cs_j) Δ_j x_j + D x_i   o = y silu(z)
//
// A block processes a chunk and loops over the heads of one group, whose scores C Bᵀ stay in registers. A TMA producer
// warp loads x, z and the state of each part of a head; a consumer warpgroup computes C H_cᵀ from shared memory and the
// product of the decayed scores, still in registers, with x.
#include "sm90_ssd.cuh"
#include "ssd.h"

namespace mimo::cuda {
namespace {

using namespace sm90;

constexpr int stages = 2, consumers = 128, threads = consumers + 32, blocks_at_once = 2;

template <int N>
struct Shared {
  static constexpr int slices = N / 64;
  struct Stage {
    char state[slices][ssd_tile_bytes];  // a tail's tiles, Tail rows each, lie at the start
    char x[ssd_tile_bytes], z[ssd_tile_bytes];  // o is written over z
  };
  char c[slices][ssd_tile_bytes];
  char b[2][ssd_tile_bytes];  // reused for y of two parts
  Stage stage[stages];
  SsdChunkTokens tokens[stages];
  uint64_t operands, full[stages], empty[stages];
};

struct Problem {
  CUtensorMap x, b, c, z;
  mimo_ssd_forward_args args;
  const bf16* states;
  const SsdChunkTokens* tokens;
};

struct Work {
  int64_t number;  // chunk number
  int first_head, heads, group;
  Piece piece;
};

template <int N, int Tail>
__device__ __forceinline__ void fetch(const Problem& problem, const Work& work, Shared<N>& shared) {
  constexpr int slices = N / 64;
  const int first = static_cast<int>(work.piece.first), last = static_cast<int>(work.piece.last);
  const int row = static_cast<int>(work.piece.index) * ssd_chunk;
  arrive_expecting(&shared.operands, 2 * slices * ssd_tile_bytes);
  for (int i = 0; i < slices; ++i) {
    copy_head_box(shared.c[i], problem.c, 0, work.group * slices + i, row, first, last, &shared.operands);
    copy_head_box(shared.b[i], problem.b, 0, work.group * slices + i, row, first, last, &shared.operands);
  }
  for (int i = 0; i < ssd_parts<Tail> * work.heads; ++i) {
    const int slot = i % stages, head = work.first_head + i / ssd_parts<Tail>, part = i % ssd_parts<Tail>;
    const uint32_t state_bytes = slices * (part == 0 ? ssd_head : Tail) * tile_row_bytes;
    uint64_t* const full = &shared.full[slot];
    wait(&shared.empty[slot], (i / stages & 1) ^ 1);
    arrive_expecting(full, state_bytes + 2 * ssd_tile_bytes + (part == 0 ? sizeof(SsdChunkTokens) : 0));
    const int64_t at = work.number * problem.args.heads + head;
    copy_bytes(shared.stage[slot].state, problem.states + (at * ssd_state_elements<Tail> + part * ssd_tile_elements) * slices,
               state_bytes, full);
    copy_head_box(shared.stage[slot].x, problem.x, part * ssd_head, head, row, first, last, full);
    copy_head_box(shared.stage[slot].z, problem.z, part * ssd_head, head, row, first, last, full);
    if (part == 0) copy_bytes(&shared.tokens[slot], problem.tokens + at, sizeof(SsdChunkTokens), full);
  }
}

/// The scores times exp(cs_i - cs_j) Δ_j for j <= i, as the left operand of the product with x.
__device__ __forceinline__ void decay_scores(const float (&scores)[32], const SsdChunkTokens& tokens, const SsdPlace& own,
                                             uint32_t (&mixed)[16]) {
  const float sum[2] = {tokens.sum[own.row], tokens.sum[own.row + 8]};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k > own.warp) {
#pragma unroll
      for (int i = 0; i < 4; ++i) mixed[4 * k + i] = 0;
      continue;
    }
#pragma unroll
    for (int j = 2 * k; j < 2 * k + 2; ++j) {
      const int column = 8 * j + own.column;
      const float2 other = pair_at(tokens.sum, column), step = pair_at(tokens.step, column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float first = scores[4 * j + 2 * half] * exp2_fast(sum[half] - other.x) * step.x;
        float second = scores[4 * j + 2 * half + 1] * exp2_fast(sum[half] - other.y) * step.y;
        if (k == own.warp) {
          const int row = own.row + 8 * half;
          if (column > row) first = 0;
          if (column + 1 > row) second = 0;
        }
        mixed[2 * j + half] = pack_bf16(first, second);
      }
    }
  }
}

/// What the parts of a head share: the decayed scores, and exp(cs) of this thread's two tokens.
struct Decayed {
  uint32_t mixed[16];
  float from_start[2];
};

/// The i-th part of the group, the columns of `head` from `First` on; the first part sets `decayed`.
template <int N, int Tail, int First>
__device__ __forceinline__ void compute_part(const Problem& problem, const Work& work, Shared<N>& shared, const float (&scores)[32],
                                             int i, int head, float d, Decayed& decayed) {
  constexpr int columns = First == 0 ? ssd_head : Tail, sums = columns / 2;
  const mimo_ssd_forward_args& args = problem.args;
  const SsdPlace own = own_place();
  const int head_dim = Tail == 0 ? ssd_head : static_cast<int>(args.head_dim), live = First == 0 ? ssd_head : head_dim - First;
  const int64_t width = args.heads * head_dim;
  const int slot = i % stages, count = static_cast<int>(work.piece.count);
  typename Shared<N>::Stage& stage = shared.stage[slot];
  char* const y_tile = shared.b[i % 2];
  wait(&shared.full[slot], i / stages & 1);
  float out[sums];
  begin_products();
  queue_product<N / 16, false, false>(out, shared.c[0], stage.state[0], false);
  commit_products();
  if constexpr (First == 0) {
    const SsdChunkTokens& tokens = shared.tokens[slot];
    decay_scores(scores, tokens, own, decayed.mixed);
    decayed.from_start[0] = tokens.from_start[own.row], decayed.from_start[1] = tokens.from_start[own.row + 8];
  }
  wait_products<0>();
  settle(out);
#pragma unroll
  for (int j = 0; j < sums; ++j) out[j] *= decayed.from_start[j / 2 % 2];
  begin_products();
  queue_product(out, decayed.mixed, stage.x);
  commit_products();
  float gate[sums];
#pragma unroll
  for (int j = 0; j < columns / 8; ++j) {
    float2 factor = make_float2(1, 1);
    if (args.z_factors != nullptr && 8 * j < live) factor = pair_at(args.z_factors + head * head_dim + First, 8 * j + own.column);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = pair_of(stage.z, own, j, half);
      const float z0 = lower_bf16(pair) * factor.x, z1 = upper_bf16(pair) * factor.y;
      gate[4 * j + 2 * half] = __fdividef(z0, 1.0f + exp2_fast(-log2_e * z0));
      gate[4 * j + 2 * half + 1] = __fdividef(z1, 1.0f + exp2_fast(-log2_e * z1));
    }
  }
  wait_products<0>();
  settle(out);
#pragma unroll
  for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t x = pair_of(stage.x, own, j, half);
      const int at = 4 * j + 2 * half;
      const float y0 = out[at] + d * lower_bf16(x), y1 = out[at + 1] + d * upper_bf16(x);
      pair_of(y_tile, own, j, half) = pack_bf16(y0, y1);
      pair_of(stage.z, own, j, half) = pack_bf16(y0 * gate[at], y1 * gate[at + 1]);
    }
  }
  meet<1, consumers>();
  const int64_t to = work.piece.begin * width + head * head_dim + First;
  if (args.y != nullptr) copy_rows<columns>(y_tile, count, live, static_cast<bf16*>(args.y) + to, width);
  copy_rows<columns>(stage.z, count, live, static_cast<bf16*>(args.o) + to, width);
  publish_stores();
  arrive_warp(&shared.empty[slot]);
}

template <int N, int Tail>
__device__ __forceinline__ void compute(const Problem& problem, const Work& work, Shared<N>& shared) {
  float scores[32];
  wait(&shared.operands, 0);
  begin_products();
  queue_product<N / 16, false, false>(scores, shared.c[0], shared.b[0], false);
  commit_products();
  wait_products<0>();
  settle(scores);
  meet<1, consumers>();  // y is written over b
  for (int i = 0; i < work.heads; ++i) {
    const int head = work.first_head + i;
    const float d = problem.args.d[head];
    Decayed decayed;
    compute_part<N, Tail, 0>(problem, work, shared, scores, ssd_parts<Tail> * i, head, d, decayed);
    if constexpr (Tail > 0) compute_part<N, Tail, ssd_head>(problem, work, shared, scores, 2 * i + 1, head, d, decayed);
  }
}

template <int N, int Tail>
__global__ void __launch_bounds__(threads, blocks_at_once) output_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  Shared<N>& shared = *reinterpret_cast<Shared<N>*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  const mimo_ssd_forward_args& args = problem.args;
  const int groups = static_cast<int>(args.groups);
  Work work;
  // Chunks in reverse: the states written last are still in the L2 cache.
  work.number = (gridDim.x - 1 - blockIdx.x) / groups, work.group = blockIdx.x % groups;
  work.heads = static_cast<int>(args.heads) / groups, work.first_head = work.group * work.heads;
  work.piece = piece_at(args.cu_seqlens, args.sequences, ssd_chunk, work.number);
  if (work.piece.count == 0) return;
  if (threadIdx.x == 0) {
    initialise(&shared.operands, 1);
    for (int i = 0; i < stages; ++i) initialise(&shared.full[i], 1), initialise(&shared.empty[i], consumers / 32);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < consumers) {
    compute<N, Tail>(problem, work, shared);
  } else if (threadIdx.x == consumers) {
    fetch<N, Tail>(problem, work, shared);
  }
#endif
}

}  // namespace

void sm90_bf16_ssd_forward(mimo_stream& stream, const mimo_ssd_forward_args& args) {
  const int64_t pieces = piece_count(args.tokens, args.sequences, ssd_chunk), slices = args.state_dim / 64;
  const SsdSizes sizes{args.cu_seqlens, args.sequences, args.tokens, args.heads, args.head_dim, args.groups, args.state_dim};
  Workspace token_space(&stream, pieces * args.heads * static_cast<int64_t>(sizeof(SsdChunkTokens)));
  SsdChunkTokens* const tokens = token_space.as<SsdChunkTokens>();
  sm90_bf16_ssd_tokens(stream, args, tokens);
  with_sizes(args.state_dim, args.head_dim, [&](auto n, auto tail) {
    Workspace state_space(&stream, pieces * args.heads * slices * ssd_state_elements<tail> * 2);
    Problem problem;
    problem.x = heads_map(args.x, args.heads, args.head_dim, args.head_dim, args.xbc_stride, ssd_chunk);
    problem.b = heads_map(args.b, args.groups * slices, 64, 64, args.xbc_stride, ssd_chunk);
    problem.c = heads_map(args.c, args.groups * slices, 64, 64, args.xbc_stride, ssd_chunk);
    problem.z = heads_map(args.z, args.heads, args.head_dim, args.head_dim, args.z_stride, ssd_chunk);
    problem.args = args;
    problem.states = state_space.as<bf16>();
    problem.tokens = tokens;
    const SsdCarry carry{problem.x, problem.b, state_space.as<bf16>(), args.final_state, false};
    sm90_bf16_ssd_states(stream, sizes, tokens, &carry, 1);
    launch(stream, output_kernel<n, tail>, grid_of(pieces * args.groups), dim3(threads), 1024 + sizeof(Shared<n>), problem);
  });
}

}  // namespace mimo::cuda
