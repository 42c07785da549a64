// The passes over the states of the gated delta rule on Hopper (gated_delta.h). A warpgroup carries the transposed state of 64 value
// columns, which are independent of the others, through a sequence: in fp32 accumulators, and packed as the left operand of products
// whose right operands a warp loads. So the chain of products of a chunk stays in registers. Another warp copies results out.
#include "sm90_gated_delta.cuh"

namespace mimo::cuda {
namespace sm90 {
namespace {

constexpr int stages = 3;

/// Results of a pass: the output; states and what chunks write; gradients of states, R and dV.
enum class Pass { output, keep, reverse };

struct Keys {
  char k[2][ssd_tile_bytes], inverse[ssd_tile_bytes], values[ssd_tile_bytes];  // v or dO
};
struct KeysAndQueries : Keys {
  char q[2][ssd_tile_bytes], pairs[ssd_tile_bytes];
};

template <Pass pass>
struct Shared {
  using Stage = std::conditional_t<pass == Pass::keep, Keys, KeysAndQueries>;
  Stage stage[stages];
  char state[2][ssd_tile_bytes];            // at a chunk's start, transposed: left by the chain for the others
  char written[pass == Pass::keep ? 1 : 2][ssd_tile_bytes];  // U and the output, U, or R and dV; a token a row
  DeltaSteps steps[stages];
  uint64_t full[stages], empty[stages], state_full, state_empty, written_full, written_empty;
};

/// Warps: the chain's, then those of the output, then one each that fetches and that copies states and other results to global memory.
template <Pass pass>
constexpr int service = pass == Pass::output ? 256 : 128;
template <Pass pass>
constexpr int threads = service<pass> + 128;

struct Problem {
  CUtensorMap q, k, values, out, dv;  // out: o, what is written, or R
  DeltaInputs in;
  DeltaChunks chunks;
  float* final_state;
  bf16* states;  // kept states or their gradients
};

/// A block's columns and sequence.
struct Work {
  int head, half, key_head, first, last, chunks;
  int64_t piece;
};

/// The number of a pass's i-th chunk.
template <Pass pass>
__device__ __forceinline__ int chunk_of(const Work& work, int i) {
  return pass == Pass::reverse ? work.chunks - 1 - i : i;
}

template <Pass pass>
__device__ __forceinline__ void fetch(const Problem& problem, const Work& work, Shared<pass>& shared) {
  for (int i = 0; i < work.chunks; ++i) {
    const int chunk = chunk_of<pass>(work, i), slot = i % stages, row = chunk * delta_chunk;
    typename Shared<pass>::Stage& stage = shared.stage[slot];
    uint64_t* const full = &shared.full[slot];
    const int64_t at = (work.piece + chunk) * problem.in.value_heads + work.head;
    wait(&shared.empty[slot], (i / stages & 1) ^ 1);
    arrive_expecting(full, sizeof(typename Shared<pass>::Stage) + sizeof(DeltaSteps));
    for (int half = 0; half < 2; ++half) copy_head_box(stage.k[half], problem.k, 64 * half, work.key_head, row, work.first, work.last, full);
    copy_bytes(&shared.steps[slot], problem.chunks.tokens + at, sizeof(DeltaSteps), full);
    copy_head_box(stage.values, problem.values, 64 * work.half, work.head, row, work.first, work.last, full);
    copy_bytes(stage.inverse, problem.chunks.inverse + at * delta_tile, ssd_tile_bytes, full);
    if constexpr (pass != Pass::keep) {
      for (int half = 0; half < 2; ++half) copy_head_box(stage.q[half], problem.q, 64 * half, work.key_head, row, work.first, work.last, full);
      copy_bytes(stage.pairs, problem.chunks.pairs + at * delta_tile, ssd_tile_bytes, full);
    }
  }
}

/// Copies the state of every chunk to global memory.
template <Pass pass>
__device__ __forceinline__ void write_states(const Problem& problem, const Work& work, Shared<pass>& shared) {
  for (int i = 0; i < work.chunks; ++i) {
    const int64_t at = (work.piece + chunk_of<pass>(work, i)) * problem.in.value_heads + work.head;
    bf16* const to = problem.states + at * delta_state_elements + work.half * delta_tile;
    wait(&shared.state_full, i & 1);
    for (int half = 0; half < 2; ++half) write_tile(shared.state[half], to + 2 * half * delta_tile);
    commit_writes();
    wait_read<0>();
    arrive(&shared.state_empty);
  }
  wait_writes();
}
/// Copies U, or R and dV, of every chunk.
template <Pass pass>
__device__ __forceinline__ void write_values(const Problem& problem, const Work& work, Shared<pass>& shared) {
  for (int i = 0; i < work.chunks; ++i) {
    const int row = chunk_of<pass>(work, i) * delta_chunk, half_head = 2 * work.head + work.half;
    wait(&shared.written_full, i & 1);
    write_head_tile(shared.written[0], problem.out, half_head, row, work.first, work.last);
    if constexpr (pass == Pass::reverse) write_head_tile(shared.written[1], problem.dv, half_head, row, work.first, work.last);
    wait_read<0>();
    arrive(&shared.written_empty);
  }
  wait_writes();
}

/// Packs both halves of a state.
__device__ __forceinline__ void pack_state(const float (&state)[2][32], uint32_t (&packed)[2][16]) {
  pack_tile(state[0], packed[0]);
  pack_tile(state[1], packed[1]);
}
/// Issues sum = stateᵀ rightᵀ over the 128 key columns; the tiles' rows run along them.
__device__ __forceinline__ void queue_through_state(float (&sum)[32], const uint32_t (&state)[2][16], const char (&right)[2][ssd_tile_bytes]) {
  queue_left<false>(sum, state[0], right[0], false);
  queue_left<false>(sum, state[1], right[1], true);
}
/// Issues state += left right over the tokens.
__device__ __forceinline__ void queue_to_state(float (&state)[2][32], const uint32_t (&left)[16], const char (&right)[2][ssd_tile_bytes]) {
  queue_left<true>(state[0], left, right[0], true);
  queue_left<true>(state[1], left, right[1], true);
}
__device__ __forceinline__ void settle_state(float (&state)[2][32]) {
  settle(state[0]);
  settle(state[1]);
}
__device__ __forceinline__ void scale_state(float (&state)[2][32], const DeltaSteps& steps) {
  const float total = exp2_fast(log2_e * steps.sum[delta_chunk - 1]);
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i / 32][i % 32] *= total;
}

/// Leaves the state at the start of the pass's i-th chunk to the other warps.
template <Pass pass>
__device__ __forceinline__ void store_state(const uint32_t (&packed)[2][16], const SsdPlace& own, int i, Shared<pass>& shared) {
  wait(&shared.state_empty, (i & 1) ^ 1);
  store_tile(shared.state[0], own, packed[0]);
  store_tile(shared.state[1], own, packed[1]);
  publish_stores();
  arrive_warp(&shared.state_full);
}
/// Writes the state after the last chunk, [128 of the key, 128 of the value].
__device__ __forceinline__ void store_final(const float (&state)[2][32], const SsdPlace& own, const Work& work, float* to) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = i / 32 * 64 + i % 32 / 4 * 8 + own.column + i % 2, value = work.half * 64 + own.row + i % 4 / 2 * 8;
    to[key * delta_head + value] = state[i / 32][i % 32];
  }
}

/// The chain of states and of what chunks write.
template <Pass pass>
__device__ __forceinline__ void carry_forward(const Problem& problem, const Work& work, Shared<pass>& shared) {
  const SsdPlace own = own_place();
  float state[2][32] = {}, sum[32];
  for (int chunk = 0; chunk < work.chunks; ++chunk) {
    const int slot = chunk % stages;
    typename Shared<pass>::Stage& stage = shared.stage[slot];
    const DeltaSteps& steps = shared.steps[slot];
    uint32_t packed[2][16], left[16], written[16];
    pack_state(state, packed);
    wait(&shared.full[slot], chunk / stages & 1);
    begin_products();
    queue_through_state(sum, packed, stage.k);
    commit_products();
    store_state(packed, own, chunk, shared);
    load_transposed(stage.values, own, written);
    const ColumnFactors beta(steps.beta, own), read(steps.read, own);
    float values[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) values[i] = beta[i] * unpacked(written, i);
    wait_products<0>();
    settle(sum);
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] = values[i] - read[i] * sum[i];
    pack_tile(sum, left);
    begin_products();
    queue_left<false>(sum, left, stage.inverse, true);
    commit_products();
    scale_state(state, steps);
    const ColumnFactors advance(steps.advance, own);
    wait(&shared.written_empty, (chunk & 1) ^ 1);
    wait_products<0>();
    settle(sum);
#pragma unroll
    for (int i = 0; i < 32; i += 2) left[i / 2] = pack_bf16(advance[i] * sum[i], advance[i + 1] * sum[i + 1]);
    begin_products();
    queue_to_state(state, left, stage.k);
    commit_products();
    pack_tile(sum, written);
    store_transposed(shared.written[0], own, written);
    publish_stores();
    arrive_warp(&shared.written_full);
    wait_products<0>();
    settle_state(state);
    arrive_warp(&shared.empty[slot]);
  }
  if (pass != Pass::output || problem.final_state == nullptr) return;
  const int64_t at = static_cast<int64_t>(blockIdx.z) * problem.in.value_heads + work.head;
  store_final(state, own, work, problem.final_state + at * delta_state_elements);
}

/// The output from the chain's states and what chunks write, both read from shared memory; a warpgroup.
__device__ __forceinline__ void compute_output(const Problem& problem, const Work& work, Shared<Pass::output>& shared) {
  const SsdPlace own = own_place();
  float output[32];
  for (int chunk = 0; chunk < work.chunks; ++chunk) {
    const int slot = chunk % stages;
    const KeysAndQueries& stage = shared.stage[slot];
    wait(&shared.full[slot], chunk / stages & 1);
    const ColumnFactors query(shared.steps[slot].query, own);
    wait(&shared.state_full, chunk & 1);
    begin_products();
    queue_product<8, false, false>(output, shared.state[0], stage.q[0], false);
    commit_products();
    wait_products<0>();
    settle(output);
    arrive_warp(&shared.state_empty);
#pragma unroll
    for (int i = 0; i < 32; ++i) output[i] *= query[i];
    wait(&shared.written_full, chunk & 1);
    begin_products();
    queue_product<4, true, false>(output, shared.written[0], stage.pairs, true);
    commit_products();
    wait_products<0>();
    settle(output);
    arrive_warp(&shared.written_empty);
    arrive_warp(&shared.empty[slot]);
    uint32_t packed[16];
    pack_tile(output, packed);
    if (threadIdx.x == 128) wait_read<0>();
    meet<1, 128>();
    store_transposed(shared.written[1], own, packed);
    publish_stores();
    meet<1, 128>();
    if (threadIdx.x == 128) {
      write_head_tile(shared.written[1], problem.out, 2 * work.head + work.half, chunk * delta_chunk, work.first, work.last);
    }
  }
  if (threadIdx.x == 128) wait_writes();
}

__device__ __forceinline__ void carry_back(const Problem& problem, const Work& work, Shared<Pass::reverse>& shared) {
  const SsdPlace own = own_place();
  float dstate[2][32] = {}, sum[32], within[32];
  for (int i = 0; i < work.chunks; ++i) {
    const int slot = i % stages;
    KeysAndQueries& stage = shared.stage[slot];
    const DeltaSteps& steps = shared.steps[slot];
    uint32_t packed[2][16], through_q[16], left[16];
    pack_state(dstate, packed);
    wait(&shared.full[slot], i / stages & 1);
    begin_products();
    queue_product<4, true, true>(within, stage.values, stage.pairs, false);
    queue_through_state(sum, packed, stage.k);
    commit_products();
    store_state(packed, own, i, shared);
    load_transposed(stage.values, own, left);
    {
      const ColumnFactors query(steps.query, own);
#pragma unroll
      for (int j = 0; j < 32; j += 2) through_q[j / 2] = pack_bf16(query[j] * unpacked(left, j), query[j + 1] * unpacked(left, j + 1));
    }
    const ColumnFactors advance(steps.advance, own);
    wait_products<0>();
    settle(within);
    settle(sum);
#pragma unroll
    for (int j = 0; j < 32; ++j) sum[j] = advance[j] * sum[j] + within[j];
    pack_tile(sum, left);
    begin_products();
    queue_left<true>(sum, left, stage.inverse, true);
    commit_products();
    scale_state(dstate, steps);
    begin_products();
    queue_to_state(dstate, through_q, stage.q);
    commit_products();
    const ColumnFactors read(steps.read, own), beta(steps.beta, own);
    wait(&shared.written_empty, (i & 1) ^ 1);
    wait_products<1>();
    settle(sum);
#pragma unroll
    for (int j = 0; j < 32; j += 2) left[j / 2] = pack_bf16(-read[j] * sum[j], -read[j + 1] * sum[j + 1]);
    begin_products();
    queue_to_state(dstate, left, stage.k);
    commit_products();
    uint32_t solved[16], dv[16];
    pack_tile(sum, solved);
#pragma unroll
    for (int j = 0; j < 32; j += 2) dv[j / 2] = pack_bf16(beta[j] * sum[j], beta[j + 1] * sum[j + 1]);
    store_transposed(shared.written[0], own, solved);
    store_transposed(shared.written[1], own, dv);
    publish_stores();
    arrive_warp(&shared.written_full);
    wait_products<0>();
    settle_state(dstate);
    arrive_warp(&shared.empty[slot]);
  }
}

template <Pass pass>
__global__ void __launch_bounds__(threads<pass>, 1) pass_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  Shared<pass>& shared = *reinterpret_cast<Shared<pass>*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  if (threadIdx.x == 0) {
    constexpr int readers = pass == Pass::output ? 4 : 1;
    for (int i = 0; i < stages; ++i) initialise(&shared.full[i], 1), initialise(&shared.empty[i], service<pass> / 32);
    initialise(&shared.state_full, 4), initialise(&shared.state_empty, readers);
    initialise(&shared.written_full, 4), initialise(&shared.written_empty, readers);
    publish_barriers();
  }
  __syncthreads();
  const DeltaInputs& in = problem.in;
  Work work;
  work.half = blockIdx.x, work.head = blockIdx.y, work.key_head = work.head / static_cast<int>(in.value_heads / in.key_heads);
  work.first = in.cu_seqlens[blockIdx.z], work.last = in.cu_seqlens[blockIdx.z + 1];
  work.chunks = (work.last - work.first + delta_chunk - 1) / delta_chunk;
  work.piece = first_piece(in.cu_seqlens, blockIdx.z, delta_chunk);
  if (threadIdx.x >= service<pass>) {
    if constexpr (pass == Pass::output) shrink_registers<40>();
    if (threadIdx.x == service<pass>) fetch<pass>(problem, work, shared);
    if constexpr (pass != Pass::output) {
      if (threadIdx.x == service<pass> + 32) write_states<pass>(problem, work, shared);
      if (threadIdx.x == service<pass> + 64) write_values<pass>(problem, work, shared);
    }
    return;
  }
  if constexpr (pass == Pass::reverse) {
    carry_back(problem, work, shared);
  } else if constexpr (pass == Pass::keep) {
    carry_forward<pass>(problem, work, shared);
  } else if (threadIdx.x < 128) {
    grow_registers<232>();
    carry_forward<pass>(problem, work, shared);
  } else {
    compute_output(problem, work, shared);
  }
#endif
}

template <Pass pass>
void run(mimo_stream& stream, const Problem& problem) {
  launch(stream, pass_kernel<pass>, grid_of(2, problem.in.value_heads, problem.in.sequences), dim3(threads<pass>), 1024 + sizeof(Shared<pass>),
         problem);
}

Problem problem_of(const DeltaInputs& in, const DeltaChunks& chunks, const bf16* values, int64_t values_stride, const bf16* out) {
  Problem problem{};
  problem.q = chunk_map(in.q, in.key_heads, in.qkv_stride);
  problem.k = chunk_map(in.k, in.key_heads, in.qkv_stride);
  problem.values = chunk_map(values, in.value_heads, values_stride);
  problem.out = half_chunk_map(out, in.value_heads, in.value_heads * delta_head);
  problem.in = in, problem.chunks = chunks;
  return problem;
}

}  // namespace

void sm90_bf16_gated_delta_passes(mimo_stream& stream, const DeltaInputs& in, const DeltaChunks& chunks, const DeltaKept& kept,
                                  const bf16* d_o, bf16* dv, int64_t dv_stride) {
  Problem problem = problem_of(in, chunks, in.v, in.qkv_stride, kept.written);
  problem.states = kept.states;
  run<Pass::keep>(stream, problem);
  problem = problem_of(in, chunks, d_o, in.value_heads * delta_head, kept.solved);
  problem.states = kept.dstates;
  problem.dv = half_chunk_map(dv, in.value_heads, dv_stride);
  run<Pass::reverse>(stream, problem);
}

}  // namespace sm90

void sm90_bf16_gated_delta_forward(mimo_stream& stream, const mimo_gated_delta_forward_args& args) {
  const DeltaInputs in = delta_inputs(args);
  Workspace space(&stream, in.pieces() * in.value_heads * delta_chunk_bytes);
  const DeltaChunks chunks = sm80_bf16_gated_delta_chunks(stream, in, space.as<char>());
  sm90::Problem problem = sm90::problem_of(in, chunks, in.v, in.qkv_stride, static_cast<bf16*>(args.o));
  problem.final_state = args.final_state;
  sm90::run<sm90::Pass::output>(stream, problem);
}

}  // namespace mimo::cuda
