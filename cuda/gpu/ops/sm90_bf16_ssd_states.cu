// State passing of the Mamba-2 chunk scan (SSD) on Hopper (docs/spec/language-model.md §2.3, §2.4).
//
// Forward  H_{c+1} = exp(cs_Q) H_c + Σ_j exp(cs_Q - cs_j) Δ_j x_j ⊗ B_j
// Reverse  dS_{c-1} = exp(cs_Q) dS_c + Σ_i exp(cs_i) dy_i ⊗ C_i
//
// A block owns 64 state columns of a head and loops over the chunks of a sequence. One warpgroup keeps the state in
// fp32 registers, a second scales the tokens' rows ahead of it. Each state is written once, as bf16.
#include "sm90_ssd.cuh"

namespace mimo::cuda {
namespace sm90 {
namespace {

constexpr int outputs = 4, threads = 2 * 128 + 2 * 32;
/// Pipeline stages of a block that is alone on its SM, and of a block that shares it with another.
constexpr int stages_of_one = 8, stages_of_two = 4;

template <int stages>
struct Shared {
  char output[outputs][ssd_tile_bytes];
  struct {
    char a[ssd_tile_bytes], b[ssd_tile_bytes];
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

template <int stages>
__device__ __forceinline__ void fetch(const Problem& problem, const SsdCarry& carry, const Work& work, Shared<stages>& shared) {
  const int heads = static_cast<int>(problem.sizes.heads), slices = static_cast<int>(problem.sizes.state_dim / 64);
  const int group = work.head / static_cast<int>(problem.sizes.heads / problem.sizes.groups);
  for (int i = 0; i < work.chunks; ++i) {
    const int slot = i % stages, chunk = carry.reverse ? work.chunks - 1 - i : i;
    uint64_t* const full = &shared.full[slot];
    wait(&shared.empty[slot], (i / stages & 1) ^ 1);
    arrive_expecting(full, 2 * ssd_tile_bytes + sizeof(SsdChunkTokens));
    copy_head_box(shared.stage[slot].a, carry.a, 0, work.head, chunk * ssd_chunk, work.first, work.last, full);
    copy_head_box(shared.stage[slot].b, carry.b, 0, group * slices + work.slice, chunk * ssd_chunk, work.first, work.last,
                  full);
    copy_bytes(&shared.tokens[slot], problem.tokens + (work.piece + chunk) * heads + work.head, sizeof(SsdChunkTokens), full);
  }
}

/// Has TMA write the states that the warpgroup leaves in shared memory.
template <int stages>
__device__ __forceinline__ void write_states(const Problem& problem, const SsdCarry& carry, const Work& work,
                                             Shared<stages>& shared) {
  const int64_t slices = problem.sizes.state_dim / 64, step = problem.sizes.heads * slices * ssd_tile_elements;
  bf16* to = carry.states + ((work.piece * problem.sizes.heads + work.head) * slices + work.slice) * ssd_tile_elements;
  if (carry.reverse) to += (work.chunks - 1) * step;
  for (int i = 0; i < work.chunks; ++i, to += carry.reverse ? -step : step) {
    wait(&shared.output_full[i % outputs], i / outputs & 1);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(shared.output[i % outputs])), "n"(ssd_tile_bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    wait_read<1>();
    if (i > 0) arrive(&shared.output_empty[(i - 1) % outputs]);
  }
  wait_read<0>();
}

/// Scales the rows of a in place in shared memory.
template <int stages>
__device__ __forceinline__ void weigh(const SsdCarry& carry, const Work& work, Shared<stages>& shared) {
  const int thread = threadIdx.x % 128, column = thread % 8;
  for (int i = 0; i < work.chunks; ++i) {
    const int slot = i % stages;
    const SsdChunkTokens& tokens = shared.tokens[slot];
    const float* const weight = carry.reverse ? tokens.from_start : tokens.weight;
    wait(&shared.full[slot], i / stages & 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = j * 16 + thread / 8;
      bf16* const at = reinterpret_cast<bf16*>(shared.stage[slot].a + tile_offset(row, column));
      float value[8];
      read(at, value);
#pragma unroll
      for (float& one : value) one *= weight[row];
      write(at, value);
    }
    publish_stores();
    arrive_warp(&shared.weighed[slot]);
  }
}

template <int stages>
__device__ __forceinline__ void carry_states(const Problem& problem, const SsdCarry& carry, const Work& work,
                                             Shared<stages>& shared) {
  const SsdPlace own = own_place();
  float state[32] = {};
  for (int i = 0; i < work.chunks; ++i) {
    const int slot = i % stages;
    uint32_t packed[16];
    pack_tile(state, packed);
    wait(&shared.full[slot], i / stages & 1);
    wait(&shared.weighed[slot], i / stages & 1);
    const float decay = shared.tokens[slot].from_start[ssd_chunk - 1];
#pragma unroll
    for (float& value : state) value *= decay;
    begin_products();
    queue_product<4, true, true>(state, shared.stage[slot].a, shared.stage[slot].b, true);
    commit_products();
    // Meanwhile the state before the chunk is written to global memory.
    wait(&shared.output_empty[i % outputs], (i / outputs & 1) ^ 1);
    store_tile(shared.output[i % outputs], own, packed);
    publish_stores();
    arrive_warp(&shared.output_full[i % outputs]);
    wait_products<0>();
    settle(state);
    arrive_warp(&shared.empty[slot]);
  }
  if (carry.last == nullptr) return;
  float* const to = carry.last + ((blockIdx.y * problem.sizes.heads + work.head) * ssd_head + own.row) * problem.sizes.state_dim +
                    work.slice * 64 + own.column;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    *reinterpret_cast<float2*>(to + 8 * j) = make_float2(state[4 * j], state[4 * j + 1]);
    *reinterpret_cast<float2*>(to + 8 * problem.sizes.state_dim + 8 * j) = make_float2(state[4 * j + 2], state[4 * j + 3]);
  }
}

template <int stages>
__global__ void __launch_bounds__(threads) states_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  Shared<stages>& shared = *reinterpret_cast<Shared<stages>*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      initialise(&shared.full[i], 1), initialise(&shared.weighed[i], 4), initialise(&shared.empty[i], 4);
    }
    for (int i = 0; i < outputs; ++i) initialise(&shared.output_full[i], 4), initialise(&shared.output_empty[i], 1);
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
  const auto run = [&](auto stages) {
    launch(stream, states_kernel<stages>, grid_of(sizes.heads * (sizes.state_dim / 64), sizes.sequences, directions),
           dim3(threads), 1024 + sizeof(Shared<stages>), problem);
  };
  if (sizes.heads * (sizes.state_dim / 64) * sizes.sequences * directions <= stream.device->multiprocessors) {
    run(std::integral_constant<int, stages_of_one>{});
  } else {
    run(std::integral_constant<int, stages_of_two>{});
  }
}

}  // namespace sm90
}  // namespace mimo::cuda
