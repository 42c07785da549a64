// State passing of the Mamba-2 chunk scan (SSD) on Hopper (docs/spec/language-model.md §2.3, §2.4).
//
// Forward  H_{c+1} = exp(cs_Q) H_c + Σ_j exp(cs_Q - cs_j) Δ_j x_j ⊗ B_j
// Reverse  dS_{c-1} = exp(cs_Q) dS_c + Σ_i exp(cs_i) dy_i ⊗ C_i
//
// A block owns 64 state columns of a head and loops over the chunks of a sequence. One warpgroup keeps the state in
// fp32 registers, a second scales the tokens' rows ahead of it. Each state is written once, as bf16. The tail of a head
// is computed transposed, [64 of the state, Tail]: wgmma's rows cannot be fewer than 64.
#include "sm90_ssd.cuh"

namespace mimo::cuda {
namespace sm90 {
namespace {

constexpr int threads = 2 * 128 + 2 * 32;
/// Pipeline stages of a block that is alone on its SM, and of a block that shares it with another, also with a tail.
constexpr int stages_of_one = 8, stages_of_two = 4, stages_with_tail = 3;

template <int stages, int Tail>
struct Shared {
  static constexpr int outputs = Tail == 0 ? 4 : Tail == 16 ? 3 : 2;
  char output[outputs][ssd_tile_bytes + Tail * tile_row_bytes];
  struct {
    char a[ssd_parts<Tail>][ssd_tile_bytes], b[ssd_tile_bytes];
  } stage[stages];
  SsdChunkTokens tokens[stages];
  uint64_t full[stages], weighed[stages], empty[stages], output_full[outputs], output_empty[outputs];
};

struct Problem {
  SsdCarry carries[2];
  SsdSizes sizes;
  const SsdChunkTokens* tokens;
};

/// The sequence of a block, its chunks, and its head and slice of the state.
struct Work {
  int first, last, chunks, head, slice;
  int64_t piece;
};

template <int stages, int Tail>
__device__ __forceinline__ void fetch(const Problem& problem, const SsdCarry& carry, const Work& work, Shared<stages, Tail>& shared) {
  const int heads = static_cast<int>(problem.sizes.heads), slices = static_cast<int>(problem.sizes.state_dim / 64);
  const int group = work.head / static_cast<int>(problem.sizes.heads / problem.sizes.groups);
  for (int i = 0; i < work.chunks; ++i) {
    const int slot = i % stages, chunk = carry.reverse ? work.chunks - 1 - i : i;
    uint64_t* const full = &shared.full[slot];
    wait(&shared.empty[slot], (i / stages & 1) ^ 1);
    arrive_expecting(full, sizeof(shared.stage[slot]) + sizeof(SsdChunkTokens));
    for (int part = 0; part < ssd_parts<Tail>; ++part) {
      copy_head_box(shared.stage[slot].a[part], carry.a, part * ssd_head, work.head, chunk * ssd_chunk, work.first, work.last, full);
    }
    copy_head_box(shared.stage[slot].b, carry.b, 0, group * slices + work.slice, chunk * ssd_chunk, work.first, work.last,
                  full);
    copy_bytes(&shared.tokens[slot], problem.tokens + (work.piece + chunk) * heads + work.head, sizeof(SsdChunkTokens), full);
  }
}

__device__ __forceinline__ void write_bytes(bf16* to, const char* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

/// Has TMA write the states that the warpgroup leaves in shared memory.
template <int stages, int Tail>
__device__ __forceinline__ void write_states(const Problem& problem, const SsdCarry& carry, const Work& work,
                                             Shared<stages, Tail>& shared) {
  constexpr int outputs = Shared<stages, Tail>::outputs;
  const int64_t slices = problem.sizes.state_dim / 64, of_head = slices * ssd_state_elements<Tail>, step = problem.sizes.heads * of_head;
  bf16* to = carry.states + (work.piece * problem.sizes.heads + work.head) * of_head + work.slice * ssd_tile_elements;
  const int64_t tail = slices * ssd_tile_elements + work.slice * (Tail * 64 - ssd_tile_elements);
  if (carry.reverse) to += (work.chunks - 1) * step;
  for (int i = 0; i < work.chunks; ++i, to += carry.reverse ? -step : step) {
    wait(&shared.output_full[i % outputs], i / outputs & 1);
    write_bytes(to, shared.output[i % outputs], ssd_tile_bytes);
    if constexpr (Tail > 0) write_bytes(to + tail, shared.output[i % outputs] + ssd_tile_bytes, Tail * tile_row_bytes);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    wait_read<1>();
    if (i > 0) arrive(&shared.output_empty[(i - 1) % outputs]);
  }
  wait_read<0>();
}

/// Scales the rows of `Columns` columns of a tile in place.
template <int Columns>
__device__ __forceinline__ void weigh_tile(char* tile, const float* weight) {
  constexpr int chunks = Columns / 8;
  const int thread = threadIdx.x % 128, column = thread % chunks;
#pragma unroll
  for (int j = 0; j < chunks / 2; ++j) {
    const int row = j * (128 / chunks) + thread / chunks;
    bf16* const at = reinterpret_cast<bf16*>(tile + tile_offset(row, column));
    float value[8];
    read(at, value);
#pragma unroll
    for (float& one : value) one *= weight[row];
    write(at, value);
  }
}

/// Scales the rows of a in place in shared memory.
template <int stages, int Tail>
__device__ __forceinline__ void weigh(const SsdCarry& carry, const Work& work, Shared<stages, Tail>& shared) {
  for (int i = 0; i < work.chunks; ++i) {
    const int slot = i % stages;
    const SsdChunkTokens& tokens = shared.tokens[slot];
    const float* const weight = carry.reverse ? tokens.from_start : tokens.weight;
    wait(&shared.full[slot], i / stages & 1);
    weigh_tile<ssd_head>(shared.stage[slot].a[0], weight);
    if constexpr (Tail > 0) weigh_tile<Tail>(shared.stage[slot].a[1], weight);
    publish_stores();
    arrive_warp(&shared.weighed[slot]);
  }
}

/// store_tile of a transposed product: rows of the tile are the product's columns.
template <int Packed>
__device__ __forceinline__ void store_transposed(char* tile, const SsdPlace& own, const uint32_t (&packed)[Packed]) {
#pragma unroll
  for (int k = 0; k < Packed / 4; ++k) {
    const char* const row = tile + tile_offset(16 * k + own.lane / 16 * 8 + own.lane % 8, 2 * own.warp + own.lane / 8 % 2);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(packed[4 * k]), "r"(packed[4 * k + 1]), "r"(packed[4 * k + 2]), "r"(packed[4 * k + 3])
                 : "memory");
  }
}

template <int stages, int Tail>
__device__ __forceinline__ void carry_states(const Problem& problem, const SsdCarry& carry, const Work& work,
                                             Shared<stages, Tail>& shared) {
  constexpr int outputs = Shared<stages, Tail>::outputs, tail_sums = Tail == 0 ? 1 : Tail / 2;
  const SsdPlace own = own_place();
  float state[32] = {}, tail[tail_sums] = {};  // tail: [64 of the state, Tail]
  for (int i = 0; i < work.chunks; ++i) {
    const int slot = i % stages;
    uint32_t packed[16], packed_tail[(tail_sums + 1) / 2];
    pack_tile(state, packed);
    if constexpr (Tail > 0) pack_tile(tail, packed_tail);
    wait(&shared.full[slot], i / stages & 1);
    wait(&shared.weighed[slot], i / stages & 1);
    const float decay = shared.tokens[slot].from_start[ssd_chunk - 1];
#pragma unroll
    for (float& value : state) value *= decay;
#pragma unroll
    for (float& value : tail) value *= decay;
    begin_products();
    queue_product<4, true, true>(state, shared.stage[slot].a[0], shared.stage[slot].b, true);
    if constexpr (Tail > 0) queue_product<4, true, true>(tail, shared.stage[slot].b, shared.stage[slot].a[1], true);
    commit_products();
    // Meanwhile the state before the chunk is written to global memory.
    wait(&shared.output_empty[i % outputs], (i / outputs & 1) ^ 1);
    store_tile(shared.output[i % outputs], own, packed);
    if constexpr (Tail > 0) store_transposed(shared.output[i % outputs] + ssd_tile_bytes, own, packed_tail);
    publish_stores();
    arrive_warp(&shared.output_full[i % outputs]);
    wait_products<0>();
    settle(state);
    if constexpr (Tail > 0) settle(tail);
    arrive_warp(&shared.empty[slot]);
  }
  if (carry.last == nullptr) return;
  const int64_t head_dim = Tail == 0 ? ssd_head : problem.sizes.head_dim, n = problem.sizes.state_dim;
  float* const of_head = carry.last + (blockIdx.y * problem.sizes.heads + work.head) * head_dim * n + work.slice * 64;
  float* const to = of_head + own.row * n + own.column;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    *reinterpret_cast<float2*>(to + 8 * j) = make_float2(state[4 * j], state[4 * j + 1]);
    *reinterpret_cast<float2*>(to + 8 * n + 8 * j) = make_float2(state[4 * j + 2], state[4 * j + 3]);
  }
#pragma unroll
  for (int j = 0; j < Tail / 8; ++j) {
    if (ssd_head + 8 * j >= head_dim) continue;
    float* const tail_to = of_head + (ssd_head + 8 * j + own.column) * n + own.row;
    tail_to[0] = tail[4 * j], tail_to[n] = tail[4 * j + 1], tail_to[8] = tail[4 * j + 2], tail_to[n + 8] = tail[4 * j + 3];
  }
}

template <int stages, int Tail>
__global__ void __launch_bounds__(threads) states_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  using Memory = Shared<stages, Tail>;
  Memory& shared = *reinterpret_cast<Memory*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      initialise(&shared.full[i], 1), initialise(&shared.weighed[i], 4), initialise(&shared.empty[i], 4);
    }
    for (int i = 0; i < Memory::outputs; ++i) initialise(&shared.output_full[i], 4), initialise(&shared.output_empty[i], 1);
    publish_barriers();
  }
  __syncthreads();
  const SsdCarry& carry = problem.carries[blockIdx.z];
  const SsdSizes& sizes = problem.sizes;
  const int slices = static_cast<int>(sizes.state_dim / 64);
  Work work;
  work.first = sizes.cu_seqlens[blockIdx.y], work.last = sizes.cu_seqlens[blockIdx.y + 1];
  work.chunks = (work.last - work.first + ssd_chunk - 1) / ssd_chunk;
  work.head = static_cast<int>(blockIdx.x) / slices, work.slice = static_cast<int>(blockIdx.x) % slices;
  work.piece = first_piece(sizes.cu_seqlens, blockIdx.y, ssd_chunk);
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    carry_states(problem, carry, work, shared);
  } else if (warpgroup == 1) {
    weigh(carry, work, shared);
  } else if (threadIdx.x == 256) {
    fetch(problem, carry, work, shared);
  } else if (threadIdx.x == 256 + 32) {
    write_states(problem, carry, work, shared);
  }
#endif
}

constexpr int token_warps = 8;

/// A warp computes the decays of one head of a chunk.
template <class Args>
__global__ void tokens_kernel(Args args, SsdChunkTokens* all) {
  const int64_t head = static_cast<int64_t>(blockIdx.y) * token_warps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, ssd_chunk, blockIdx.x);
  if (head >= args.heads || piece.count == 0) return;
  const float a = -expf(args.a_log[head]), bias = args.dt_bias[head];
  float step[2], sum[2], before = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 32 * i + lane;
    const bool live = t < piece.count;
    const float free =
        live ? softplus(load(static_cast<const bf16*>(args.dt) + (piece.begin + t) * args.dt_stride + head) + bias) : 0.0f;
    step[i] = live && free < args.dt_minimum ? args.dt_minimum : free;  // NaN stays NaN
    sum[i] = a * step[i];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(all_lanes, sum[i], offset);
      if (lane >= offset) sum[i] += other;
    }
    sum[i] += before;
    before = __shfl_sync(all_lanes, sum[i], 31);
  }
  SsdChunkTokens& to = all[blockIdx.x * args.heads + head];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 32 * i + lane;
    const float to_end = expf(before - sum[i]);
    to.sum[t] = sum[i] * log2_e;
    to.step[t] = step[i];
    to.to_end[t] = to_end;
    to.weight[t] = to_end * step[i];
    to.from_start[t] = expf(sum[i]);
  }
}

}  // namespace

template <class Args>
void sm90_bf16_ssd_tokens(mimo_stream& stream, const Args& args, SsdChunkTokens* tokens) {
  launch(stream, tokens_kernel<Args>,
         grid_of(piece_count(args.tokens, args.sequences, ssd_chunk), ceil_div(args.heads, token_warps)),
         dim3(32 * token_warps), 0, args, tokens);
}
template void sm90_bf16_ssd_tokens(mimo_stream&, const mimo_ssd_forward_args&, SsdChunkTokens*);
template void sm90_bf16_ssd_tokens(mimo_stream&, const mimo_ssd_backward_args&, SsdChunkTokens*);

void sm90_bf16_ssd_states(mimo_stream& stream, const SsdSizes& sizes, const SsdChunkTokens* tokens, const SsdCarry* carries,
                          int directions) {
  Problem problem{};
  for (int i = 0; i < directions; ++i) problem.carries[i] = carries[i];
  problem.sizes = sizes, problem.tokens = tokens;
  const int64_t slices = sizes.heads * (sizes.state_dim / 64);
  const auto run = [&](auto stages, auto tail) {
    launch(stream, states_kernel<stages, tail>, grid_of(slices, sizes.sequences, directions), dim3(threads),
           1024 + sizeof(Shared<stages, tail>), problem);
  };
  with_tail(sizes.head_dim, [&](auto tail) {
    if constexpr (tail > 0) {
      run(std::integral_constant<int, stages_with_tail>{}, tail);
    } else if (slices * sizes.sequences * directions <= stream.device->multiprocessors) {
      run(std::integral_constant<int, stages_of_one>{}, tail);
    } else {
      run(std::integral_constant<int, stages_of_two>{}, tail);
    }
  });
}

}  // namespace sm90
}  // namespace mimo::cuda
