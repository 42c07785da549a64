// Backward of the gated delta rule on Hopper (gated_delta.h): the passes over states and their gradients, then a kernel for the gradients
// of queries, keys and gates of all chunks at once. Two warpgroups share a chunk and key head and go through its value heads: each owns
// 64 of the 128 key columns, and one of the two matrices of pairs of tokens.
#include "gated_delta_decays.cuh"
#include "sm90_gated_delta.cuh"

namespace mimo::cuda {
namespace sm90 {
namespace {

constexpr int consumers = 256, threads = consumers + 128;

/// Sums over a head's chunk.
struct Parts {
  float rows[2][delta_chunk], columns[8][delta_chunk], diagonal[delta_chunk], totals[8];
};

struct Shared {
  struct Keys {
    char k[2][ssd_tile_bytes], q[2][ssd_tile_bytes];
  };
  Keys keys[2];
  char state[2][2][ssd_tile_bytes], dstate[2][2][ssd_tile_bytes];  // [64 of the key][64 of the value]
  char d_o[2][ssd_tile_bytes], solved[2][ssd_tile_bytes], written[2][ssd_tile_bytes];
  char pairs[2][ssd_tile_bytes];  // dO Uᵀ ⊙ Γ and M, with the factors of their keys and queries
  DeltaTokens tokens[2];
  Parts parts[2];
  float dots[2][2][delta_chunk];
  uint64_t keys_full[2], keys_empty[2], tokens_empty[2], parts_full[2], parts_empty[2], values_full, values_empty, state_full, state_empty, dstate_full, dstate_empty;
};

struct Problem {
  CUtensorMap q, k, d_o, written, solved;
  mimo_gated_delta_backward_args args;
  DeltaInputs in;
  DeltaChunks chunks;
  DeltaKept kept;
  SsdHeadSums* sums;
  int64_t units;  // chunks x key heads
};

/// The block's next chunk and key head that is not empty.
struct Unit {
  Piece piece;
  int64_t number;
  int key_head;
};
__device__ __forceinline__ bool next_unit(const Problem& problem, int64_t& index, Unit& unit) {
  for (; index < problem.units; index += gridDim.x) {
    unit.number = index / problem.in.key_heads, unit.key_head = static_cast<int>(index % problem.in.key_heads);
    unit.piece = piece_at(problem.in.cu_seqlens, problem.in.sequences, delta_chunk, unit.number);
    if (unit.piece.count == 0) continue;
    index += gridDim.x;
    return true;
  }
  return false;
}

__device__ __forceinline__ void fetch(const Problem& problem, Shared& shared) {
  const int heads = static_cast<int>(problem.in.value_heads / problem.in.key_heads);
  int64_t index = blockIdx.x;
  Unit unit;
  for (int u = 0, step = 0; next_unit(problem, index, unit); ++u) {
    const int row = static_cast<int>(unit.piece.index) * delta_chunk;
    const int first = static_cast<int>(unit.piece.first), last = static_cast<int>(unit.piece.last);
    wait(&shared.keys_empty[u % 2], (u / 2 & 1) ^ 1);
    arrive_expecting(&shared.keys_full[u % 2], sizeof(Shared::Keys));
    const auto copy = [&](char(&to)[2][ssd_tile_bytes], const CUtensorMap& map, int head, uint64_t* full) {
      for (int half = 0; half < 2; ++half) copy_head_box(to[half], map, 64 * half, head, row, first, last, full);
    };
    copy(shared.keys[u % 2].k, problem.k, unit.key_head, &shared.keys_full[u % 2]);
    copy(shared.keys[u % 2].q, problem.q, unit.key_head, &shared.keys_full[u % 2]);
    for (int i = 0; i < heads; ++i, ++step) {
      const int head = unit.key_head * heads + i;
      const int64_t at = unit.number * problem.in.value_heads + head;
      const uint32_t parity = (step & 1) ^ 1;
      wait(&shared.tokens_empty[step % 2], (step / 2 & 1) ^ 1);
      wait(&shared.values_empty, parity);
      arrive_expecting(&shared.values_full, 6 * ssd_tile_bytes + sizeof(DeltaTokens));
      copy_bytes(&shared.tokens[step % 2], problem.chunks.tokens + at, sizeof(DeltaTokens), &shared.values_full);
      copy(shared.d_o, problem.d_o, head, &shared.values_full);
      copy(shared.solved, problem.solved, head, &shared.values_full);
      copy(shared.written, problem.written, head, &shared.values_full);
      wait(&shared.state_empty, parity);
      arrive_expecting(&shared.state_full, sizeof shared.state);
      copy_bytes(shared.state, problem.kept.states + at * delta_state_elements, sizeof shared.state, &shared.state_full);
      wait(&shared.dstate_empty, parity);
      arrive_expecting(&shared.dstate_full, sizeof shared.dstate);
      copy_bytes(shared.dstate, problem.kept.dstates + at * delta_state_elements, sizeof shared.dstate, &shared.dstate_full);
    }
  }
}

/// Issues sum = left right over the 128 value columns; the right tiles' rows run along them.
__device__ __forceinline__ void queue_values(float (&sum)[32], const char (&left)[2][ssd_tile_bytes], const char (&right)[2][ssd_tile_bytes]) {
  queue_product<4, false, true>(sum, left[0], right[0], false);
  queue_product<4, false, true>(sum, left[1], right[1], true);
}

/// x += sign · factor of its row · product; adds the products with `own_tile` to dots.
__device__ __forceinline__ void add_scaled(const float (&product)[32], float sign, const float* factors, const char* own_tile,
                                           const SsdPlace& own, float (&x)[32], float (&dots)[2]) {
  const float factor[2] = {sign * factors[own.row], sign * factors[own.row + 8]};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t value = pair_of(own_tile, own, j, half);
      const int i = 4 * j + 2 * half;
      const float first = factor[half] * product[i], second = factor[half] * product[i + 1];
      x[i] += first, x[i + 1] += second;
      dots[half] += first * lower_bf16(value) + second * upper_bf16(value);
    }
  }
}

/// x · own of this thread's rows, over the warpgroup's columns.
__device__ __forceinline__ void put_dots(const float (&x)[32], const char* own_tile, const SsdPlace& own, float* to) {
  float dots[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const uint32_t value = pair_of(own_tile, own, i / 4, i / 2 % 2);
    dots[i / 2 % 2] += x[i] * lower_bf16(value) + x[i + 1] * upper_bf16(value);
  }
  dots[0] = quad_sum(dots[0]), dots[1] = quad_sum(dots[1]);
  if (own.lane % 4 == 0) to[own.row] = dots[0], to[own.row + 8] = dots[1];
}
/// Gradients of raw keys or queries, dx = y - x f² (x · y) with y = f dx̂.
__device__ __forceinline__ void store_gradient(const float (&y)[32], const char* x, const SsdPlace& own, const float (&dots)[2][delta_chunk],
                                               const float* factors, float scale, int count, bf16* to, int64_t stride) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own.row + 8 * half;
    if (row >= count) continue;
    const float along = scale * factors[row] * factors[row] * (dots[0][row] + dots[1][row]);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t value = pair_of(x, own, j, half);
      const int i = 4 * j + 2 * half;
      *reinterpret_cast<uint32_t*>(to + row * stride + 8 * j + own.column) =
          pack_bf16(y[i] - along * lower_bf16(value), y[i + 1] - along * upper_bf16(value));
    }
  }
}

/// Sums of x over the warp's 16 rows.
__device__ __forceinline__ void put_column_sums(const float (&x)[16], const SsdPlace& own, float* to) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    float value = x[j];
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) value += __shfl_xor_sync(all_lanes, value, offset);
    if (own.lane < 4) to[j / 2 * 8 + own.column + j % 2] = value;
  }
}

/// Turns dO Uᵀ (part 0) or R Uᵀ (part 1) into the gradient of Q Kᵀ or K Kᵀ of raw queries and keys; adds what it says of the decays.
__device__ __forceinline__ void mix_pairs(float (&x)[32], const float (&products)[32], const DeltaTokens& tokens, int part,
                                          const SsdPlace& own, float (&inside)[2], float (&columns)[16]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int half = i / 2 % 2, row = own.row + 8 * half, column = i / 4 * 8 + own.column + i % 2;
    const float factor = part == 0 ? tokens.q[row] : -tokens.beta[row] * tokens.k[row];
    const float decay = column + part <= row ? exp2_fast(log2_e * (tokens.sum[row] - tokens.sum[column])) * tokens.k[column] : 0.0f;
    x[i] *= factor * decay;
    const float term = x[i] * products[i];
    inside[half] += term;
    columns[i / 4 * 2 + i % 2] += term;
  }
}

/// finish_decays() for every head; one warp.
__device__ __forceinline__ void finish_heads(const Problem& problem, Shared& shared) {
  const int first = 2 * (static_cast<int>(threadIdx.x) % 32), heads = static_cast<int>(problem.in.value_heads / problem.in.key_heads);
  int64_t index = blockIdx.x;
  Unit unit;
  for (int step = 0; next_unit(problem, index, unit);) {
    const int count = static_cast<int>(unit.piece.count);
    for (int i = 0; i < heads; ++i, ++step) {
      const int slot = step % 2, head = unit.key_head * heads + i;
      const Parts& parts = shared.parts[slot];
      wait(&shared.parts_full[slot], step / 2 & 1);
      float at_end = 0, own[2];
#pragma unroll
      for (int j = 0; j < 8; ++j) at_end += parts.totals[j];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        own[j] = parts.rows[0][first + j] + parts.rows[1][first + j];
#pragma unroll
        for (int part = 0; part < 8; ++part) own[j] -= parts.columns[part][first + j];
        if (first + j == count - 1) own[j] += at_end;
      }
      finish_decays(problem.args, unit.piece.begin, count, head, shared.tokens[slot], own,
                    {parts.diagonal[first], parts.diagonal[first + 1]}, problem.sums[unit.number * problem.in.value_heads + head]);
      arrive_warp(&shared.parts_empty[slot]);
      arrive_warp(&shared.tokens_empty[slot]);
    }
  }
}

__device__ __forceinline__ void compute(const Problem& problem, Shared& shared) {
  const SsdPlace own = own_place();
  const int part = threadIdx.x / 128, heads = static_cast<int>(problem.in.value_heads / problem.in.key_heads);
  int64_t index = blockIdx.x;
  Unit unit;
  for (int u = 0, step = 0; next_unit(problem, index, unit); ++u) {
    const Shared::Keys& keys = shared.keys[u % 2];
    const int count = static_cast<int>(unit.piece.count);
    float products[32], dq[32] = {}, dk[32] = {};
    wait(&shared.keys_full[u % 2], u / 2 & 1);
    begin_products();
    queue_product<8, false, false>(products, part == 0 ? keys.q[0] : keys.k[0], keys.k[0], false);
    commit_products();
    wait_products<0>();
    settle(products);
    for (int i = 0; i < heads; ++i, ++step) {
      const uint32_t parity = step & 1;
      const DeltaTokens& tokens = shared.tokens[step % 2];
      float first[32], second[32], inside[2] = {0, 0}, share[2] = {0, 0};
      wait(&shared.values_full, parity);
      wait(&shared.state_full, parity);
      begin_products();
      queue_values(first, shared.d_o, shared.state[part]);
      queue_values(second, shared.solved, shared.state[part]);
      commit_products();
      wait(&shared.dstate_full, parity);
      float total = 0;
      for (int at = threadIdx.x; at < static_cast<int>(sizeof shared.state) / 16; at += consumers) {
        float s[8], d[8];
        read(reinterpret_cast<const bf16*>(shared.state) + 8 * at, s);
        read(reinterpret_cast<const bf16*>(shared.dstate) + 8 * at, d);
#pragma unroll
        for (int j = 0; j < 8; ++j) total += s[j] * d[j];
      }
      total *= exp2_fast(log2_e * tokens.sum[delta_chunk - 1]);
      wait_products<0>();
      settle(first);
      settle(second);
      arrive_warp(&shared.state_empty);
      add_scaled(first, 1, tokens.query, keys.q[part], own, dq, inside);
      add_scaled(second, -1, tokens.read, keys.k[part], own, dk, inside);
      begin_products();
      queue_values(first, shared.written, shared.dstate[part]);
      queue_product<8, false, false>(second, part == 0 ? shared.d_o[0] : shared.solved[0], shared.written[0], false);
      commit_products();
      wait_products<0>();
      settle(first);
      settle(second);
      arrive_warp(&shared.dstate_empty);
      arrive_warp(&shared.values_empty);
      add_scaled(first, 1, tokens.advance, keys.k[part], own, dk, share);
      total = warp_sum(total + share[0] + share[1]);
      inside[0] -= share[0], inside[1] -= share[1];
      float columns[16] = {};
      Parts& parts = shared.parts[step % 2];
      wait(&shared.parts_empty[step % 2], (step / 2 & 1) ^ 1);
      if (part == 1) {
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          const int row = own.row + 8 * (j / 2 % 2);
          if (j / 4 * 8 + own.column + j % 2 == row) parts.diagonal[row] = second[j];
        }
      }
      mix_pairs(second, products, tokens, part, own, inside, columns);
      inside[0] = quad_sum(inside[0]), inside[1] = quad_sum(inside[1]);
      if (own.lane % 4 == 0) parts.rows[part][own.row] = inside[0], parts.rows[part][own.row + 8] = inside[1];
      put_column_sums(columns, own, parts.columns[4 * part + own.warp]);
      if (own.lane == 0) parts.totals[4 * part + own.warp] = total;
      arrive_warp(&shared.parts_full[step % 2]);
      uint32_t packed[16];
      pack_tile(second, packed);
      meet<1, consumers>();  // the pairs of the head before have been read
      store_tile(shared.pairs[part], own, packed);
      publish_stores();
      meet<1, consumers>();
      begin_products();
      queue_product<4, false, true>(dq, shared.pairs[0], keys.k[part], true);
      queue_product<4, true, true>(dk, shared.pairs[0], keys.q[part], true);
      queue_product<4, false, true>(dk, shared.pairs[1], keys.k[part], true);
      queue_product<4, true, true>(dk, shared.pairs[1], keys.k[part], true);
      commit_products();
      wait_products<0>();
      settle(dq);
      settle(dk);
      if (i + 1 == heads) {
        put_dots(dq, keys.q[part], own, shared.dots[0][part]);
        put_dots(dk, keys.k[part], own, shared.dots[1][part]);
        meet<1, consumers>();
        const int64_t to = unit.piece.begin * problem.args.dqkv_stride + unit.key_head * delta_head + 64 * part;
        store_gradient(dq, keys.q[part], own, shared.dots[0], tokens.q, delta_head, count, static_cast<bf16*>(problem.args.dq) + to,
                       problem.args.dqkv_stride);
        store_gradient(dk, keys.k[part], own, shared.dots[1], tokens.k, 1, count, static_cast<bf16*>(problem.args.dk) + to,
                       problem.args.dqkv_stride);
      }
      arrive_warp(&shared.tokens_empty[step % 2]);
    }
    arrive_warp(&shared.keys_empty[u % 2]);
  }
}

__global__ void __launch_bounds__(threads, 1) gradients_kernel(const __grid_constant__ Problem problem) {
#ifdef MIMO_ON_SM90A
  extern __shared__ char unaligned[];
  Shared& shared = *reinterpret_cast<Shared*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) initialise(&shared.keys_full[i], 1), initialise(&shared.keys_empty[i], consumers / 32);
    for (int i = 0; i < 2; ++i) {
      initialise(&shared.tokens_empty[i], consumers / 32 + 1);
      initialise(&shared.parts_full[i], consumers / 32), initialise(&shared.parts_empty[i], 1);
    }
    initialise(&shared.values_full, 1), initialise(&shared.values_empty, consumers / 32);
    initialise(&shared.state_full, 1), initialise(&shared.state_empty, consumers / 32);
    initialise(&shared.dstate_full, 1), initialise(&shared.dstate_empty, consumers / 32);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < consumers) {
    grow_registers<232>();
    compute(problem, shared);
  } else {
    shrink_registers<40>();
    if (threadIdx.x == consumers) fetch(problem, shared);
    if (threadIdx.x / 32 == consumers / 32 + 1) finish_heads(problem, shared);
  }
#endif
}

}  // namespace
}  // namespace sm90

void sm90_bf16_gated_delta_backward(mimo_stream& stream, const mimo_gated_delta_backward_args& args) {
  using namespace sm90;
  const DeltaInputs in = delta_inputs(args);
  const int64_t chunks = in.pieces() * in.value_heads, states = chunks * delta_state_elements, width = in.value_heads * delta_head;
  Workspace chunk_space(&stream, chunks * delta_chunk_bytes), state_space(&stream, 4 * states), value_space(&stream, 4 * in.tokens * width);
  Workspace sum_space(&stream, chunks * static_cast<int64_t>(sizeof(SsdHeadSums)));
  bf16 *const kept = state_space.as<bf16>(), *const written = value_space.as<bf16>();
  Problem problem{};
  problem.args = args, problem.in = in, problem.kept = {kept, written, kept + states, written + in.tokens * width};
  problem.chunks = sm80_bf16_gated_delta_chunks(stream, in, chunk_space.as<char>());
  problem.sums = sum_space.as<SsdHeadSums>(), problem.units = in.pieces() * in.key_heads;
  const bf16* const d_o = static_cast<const bf16*>(args.d_o);
  sm90_bf16_gated_delta_passes(stream, in, problem.chunks, problem.kept, d_o, static_cast<bf16*>(args.dv), args.dqkv_stride);
  problem.q = chunk_map(in.q, in.key_heads, in.qkv_stride);
  problem.k = chunk_map(in.k, in.key_heads, in.qkv_stride);
  problem.d_o = chunk_map(d_o, in.value_heads, width);
  problem.written = chunk_map(problem.kept.written, in.value_heads, width);
  problem.solved = chunk_map(problem.kept.solved, in.value_heads, width);
  launch(stream, gradients_kernel, grid_of(smaller(problem.units, stream.device->multiprocessors)), dim3(threads), 1024 + sizeof(Shared),
         problem);
  if (args.da_log != nullptr || args.ddt_bias != nullptr) {
    ssd_add_head_sums(stream, problem.sums, in.cu_seqlens, in.sequences, in.pieces(), in.value_heads, delta_chunk, nullptr, args.da_log,
                      args.ddt_bias);
  }
}

}  // namespace mimo::cuda
