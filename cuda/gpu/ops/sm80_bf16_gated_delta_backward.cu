// Backward of the gated delta rule through mma.sync (gated_delta.h): a pass that keeps the states, a pass over the gradients of the states
// from the last chunk to the first, and a kernel that computes the other gradients of all chunks at once.
#include "gated_delta_decays.cuh"
#include "sm80_gated_delta.cuh"

namespace mimo::cuda {
namespace {

constexpr int block_columns = 64, keys_bytes = 2 * ssd_tile_bytes;

/// Results of the reverse pass: dS' of chunks [pieces, H_v, 128, 128] and R [T, H_v 128].
struct Reverse {
  bf16 *dstates, *solved;
};

struct PassStage {
  char k[keys_bytes], q[keys_bytes], inverse[ssd_tile_bytes], pairs[ssd_tile_bytes], d_o[ssd_tile_bytes];
  DeltaSteps tokens;
};
struct PassShared {
  PassStage stage[2];
  char dstate[keys_bytes];  // rows 64 .. 127 follow the first
  char dwritten[ssd_tile_bytes], through_k[ssd_tile_bytes], through_q[ssd_tile_bytes];
};

__global__ void __launch_bounds__(ssd_block) reverse_kernel(DeltaInputs in, DeltaChunks chunks, const bf16* d_o, bf16* dv, int64_t dv_stride,
                                                            Reverse to) {
  extern __shared__ __align__(128) char memory[];
  PassShared& shared = *reinterpret_cast<PassShared*>(memory);
  const int64_t column = blockIdx.x * block_columns, head = blockIdx.y, sequence = blockIdx.z;
  const int64_t first = in.cu_seqlens[sequence], last = in.cu_seqlens[sequence + 1], width = in.value_heads * delta_head;
  const int64_t key_column = head / (in.value_heads / in.key_heads) * delta_head, own_column_of_v = head * delta_head + column;
  const int64_t piece = first_piece(in.cu_seqlens, sequence, ssd_chunk);
  const int steps = static_cast<int>(ceil_div(last - first, ssd_chunk));
  const auto count_of = [&](int step) { return static_cast<int>(smaller(ssd_chunk, last - first - step * ssd_chunk)); };
  const auto fetch = [&](int step) {
    PassStage& stage = shared.stage[step % 2];
    const int count = count_of(step);
    const int64_t begin = first + step * ssd_chunk, at = (piece + step) * in.value_heads + head;
    fetch_rows(in.k + begin * in.qkv_stride + key_column, in.qkv_stride, count, delta_head, stage.k);
    fetch_rows(in.q + begin * in.qkv_stride + key_column, in.qkv_stride, count, delta_head, stage.q);
    fetch_rows(d_o + begin * width + own_column_of_v, width, count, block_columns, stage.d_o);
    fetch_bytes(chunks.inverse + at * delta_tile, ssd_tile_bytes, stage.inverse);
    fetch_bytes(chunks.pairs + at * delta_tile, ssd_tile_bytes, stage.pairs);
    fetch_bytes(chunks.tokens + at, sizeof(DeltaSteps), &stage.tokens);
    copy_commit();
  };
  SsdSums<64> dstate[2] = {};
  for (int index = threadIdx.x; index < keys_bytes / 16; index += ssd_block) reinterpret_cast<uint4*>(shared.dstate)[index] = uint4{};
  if (steps > 0) fetch(steps - 1);
  for (int step = steps - 1; step >= 0; --step) {
    copy_wait<0>();
    __syncthreads();
    const PassStage& now = shared.stage[step % 2];
    const int64_t begin = first + step * ssd_chunk;
    const int count = count_of(step);
    if (step > 0) fetch(step - 1);
    bf16* const kept = to.dstates + ((piece + step) * in.value_heads + head) * delta_head * delta_head + column;
    store_rows(shared.dstate, ssd_chunk, kept, delta_head);
    store_rows(shared.dstate + ssd_tile_bytes, ssd_chunk, kept + ssd_chunk * delta_head, delta_head);
    const RowPair beta(now.tokens.beta), read(now.tokens.read), query(now.tokens.query), advance(now.tokens.advance);
    const float total = decay_of(now.tokens);
    SsdSums<64> solved = {};
    add_product<delta_head, 64, false, true>(now.k, shared.dstate, solved);
    for_each_pair<64>(solved, [&](int i, int c, float& x, float& y, int half) {
      x *= advance[half], y *= advance[half];
      const uint32_t gradient = pair_at(now.d_o, i, c);
      put_pair(shared.through_q, i, c, query[half] * lower_bf16(gradient), query[half] * upper_bf16(gradient));
    });
    add_product<64, 64, true, true>(now.pairs, now.d_o, solved);
    for_each_pair<64>(solved, [&](int i, int c, float x, float y, int) { put_pair(shared.dwritten, i, c, x, y); });
    __syncthreads();
    add_product<64, 64, true, true>(now.inverse, shared.dwritten, solved);
    for_each_pair<64>(solved, [&](int i, int c, float x, float y, int half) {
      put_pair(shared.through_k, i, c, -read[half] * x, -read[half] * y);
      if (i >= count) return;
      const int64_t at = begin + i;
      *reinterpret_cast<uint32_t*>(to.solved + at * width + own_column_of_v + c) = pack_bf16(x, y);
      *reinterpret_cast<uint32_t*>(dv + at * dv_stride + own_column_of_v + c) = pack_bf16(beta[half] * x, beta[half] * y);
    });
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (auto& sums : dstate[half]) {
        for (float& x : sums) x *= total;
      }
      add_product<64, 64, true, true>(now.q + half * ssd_tile_bytes, shared.through_q, dstate[half]);
      add_product<64, 64, true, true>(now.k + half * ssd_tile_bytes, shared.through_k, dstate[half]);
      for_each_pair<64>(dstate[half], [&](int r, int c, float x, float y, int) {
        put_pair(shared.dstate + half * ssd_tile_bytes, r, c, x, y);
      });
    }
  }
}

struct ChunkShared {
  char k[keys_bytes], q[keys_bytes];
  char written[keys_bytes], solved[keys_bytes], d_o[keys_bytes];
  // Of each, the columns 64 .. 127 of rows 0 .. 63 follow the first, then rows 64 .. 127. The pairs replace `state`.
  union {
    char state[2 * keys_bytes];
    struct {
      char pairs[ssd_tile_bytes], mixed[ssd_tile_bytes];
    };
  };
  char dstate[2 * keys_bytes];
  DeltaTokens tokens;
  float rows[2][ssd_chunk], columns[4][ssd_chunk], diagonal[ssd_chunk], sums[2 * 32];
};

/// finish_decays() from the sums of a chunk and head; one warp.
__device__ __forceinline__ void finish_head(const mimo_gated_delta_backward_args& args, const Piece& piece, int64_t head,
                                            const ChunkShared& shared, float at_end, SsdHeadSums& to) {
  const int first = 2 * (static_cast<int>(threadIdx.x) % 32), count = static_cast<int>(piece.count);
  float own[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    own[i] = shared.rows[0][first + i] + shared.rows[1][first + i];
#pragma unroll
    for (int part = 0; part < 4; ++part) own[i] -= shared.columns[part][first + i];
    if (first + i == count - 1) own[i] += at_end;
  }
  finish_decays(args, piece.begin, count, head, shared.tokens, own, {shared.diagonal[first], shared.diagonal[first + 1]}, to);
}

/// x += sign · factor of its row · product; adds the products with `own` to dots.
__device__ __forceinline__ void add_scaled(const SsdSums<64>& product, float sign, const RowPair& factor, const char* own, SsdSums<64>& x,
                                           float (&dots)[2]) {
  const int lane = threadIdx.x % 32, row = own_row() + lane / 4, column = own_column<64>() + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t value = pair_at(own, row + 8 * half, column + 8 * j);
      const float first = sign * factor[half] * product[j][2 * half], second = sign * factor[half] * product[j][2 * half + 1];
      x[j][2 * half] += first, x[j][2 * half + 1] += second;
      dots[half] += first * lower_bf16(value) + second * upper_bf16(value);
    }
  }
}

/// Gradients of raw keys or queries, dx = y - x f² (x · y) with y = f dx̂. Has two barriers.
__device__ __forceinline__ void store_keys(const SsdSums<64> (&y)[2], const char* x, const float (&square)[2], float (&sums)[2][ssd_chunk],
                                           int count, bf16* to, int64_t stride) {
  const int lane = threadIdx.x % 32, row = own_row() + lane / 4, column = own_column<64>() + lane % 4 * 2;
  float dots[2] = {0, 0};
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t own = pair_at(x + part * ssd_tile_bytes, row + 8 * half, column + 8 * j);
          body(half, part * ssd_chunk + column + 8 * j, lower_bf16(own), upper_bf16(own), y[part][j][2 * half], y[part][j][2 * half + 1]);
        }
      }
    }
  };
  each([&](int half, int, float first, float second, float dfirst, float dsecond) { dots[half] += first * dfirst + second * dsecond; });
  __syncthreads();
  put_row_sums(dots[0], dots[1], sums);
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) dots[half] = square[half] * (sums[0][row + 8 * half] + sums[1][row + 8 * half]);
  each([&](int half, int c, float first, float second, float dfirst, float dsecond) {
    if (row + 8 * half >= count) return;
    *reinterpret_cast<uint32_t*>(to + (row + 8 * half) * stride + c) = pack_bf16(dfirst - dots[half] * first, dsecond - dots[half] * second);
  });
}

__global__ void __launch_bounds__(ssd_block) gradients_kernel(mimo_gated_delta_backward_args args, DeltaInputs in, DeltaChunks chunks,
                                                              DeltaStates states, Reverse reverse, SsdHeadSums* sums) {
  extern __shared__ __align__(128) char memory[];
  ChunkShared& shared = *reinterpret_cast<ChunkShared*>(memory);
  const Piece piece = piece_at(in.cu_seqlens, in.sequences, ssd_chunk, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t key_head = blockIdx.y, heads = in.value_heads / in.key_heads, width = in.value_heads * delta_head;
  const int64_t from = piece.begin * in.qkv_stride + key_head * delta_head;
  const int count = static_cast<int>(piece.count), lane = static_cast<int>(threadIdx.x) % 32;
  fetch_rows(in.k + from, in.qkv_stride, count, delta_head, shared.k);
  fetch_rows(in.q + from, in.qkv_stride, count, delta_head, shared.q);
  SsdSums<64> kk = {}, qk = {}, dq[2] = {}, dk[2] = {};
  float q_square[2] = {}, k_square[2] = {};
  for (int64_t head = key_head * heads; head < (key_head + 1) * heads; ++head) {
    __syncthreads();
    const int64_t at = static_cast<int64_t>(blockIdx.x) * in.value_heads + head, value_at = piece.begin * width + head * delta_head;
    fetch_rows(states.written + value_at, width, count, delta_head, shared.written);
    fetch_rows(reverse.solved + value_at, width, count, delta_head, shared.solved);
    fetch_rows(static_cast<const bf16*>(args.d_o) + value_at, width, count, delta_head, shared.d_o);
    for (int half = 0; half < 2; ++half) {
      const int64_t state_at = (at * 2 + half) * ssd_chunk * delta_head;
      fetch_rows(states.states + state_at, delta_head, ssd_chunk, delta_head, shared.state + half * keys_bytes);
      fetch_rows(reverse.dstates + state_at, delta_head, ssd_chunk, delta_head, shared.dstate + half * keys_bytes);
    }
    fetch_bytes(chunks.tokens + at, sizeof(DeltaTokens), &shared.tokens);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    if (head == key_head * heads) {
      add_product<delta_head, 64, false, false>(shared.k, shared.k, kk);
      add_product<delta_head, 64, false, false>(shared.q, shared.k, qk);
    }
    const DeltaTokens& tokens = shared.tokens;
    float inside[2] = {0, 0}, shares[2] = {0, 0}, totals[2] = {0, 0};
    for (int index = threadIdx.x; index < keys_bytes / 8; index += ssd_block) {
      const uint2 s = reinterpret_cast<const uint2*>(shared.state)[index], d = reinterpret_cast<const uint2*>(shared.dstate)[index];
      const uint2 s2 = reinterpret_cast<const uint2*>(shared.state)[index + keys_bytes / 8];
      const uint2 d2 = reinterpret_cast<const uint2*>(shared.dstate)[index + keys_bytes / 8];
      totals[0] += lower_bf16(s.x) * lower_bf16(d.x) + upper_bf16(s.x) * upper_bf16(d.x) + lower_bf16(s.y) * lower_bf16(d.y) +
                   upper_bf16(s.y) * upper_bf16(d.y);
      totals[0] += lower_bf16(s2.x) * lower_bf16(d2.x) + upper_bf16(s2.x) * upper_bf16(d2.x) + lower_bf16(s2.y) * lower_bf16(d2.y) +
                   upper_bf16(s2.y) * upper_bf16(d2.y);
    }
    totals[0] *= decay_of(tokens);

    // Through the states.
    const RowPair sum(tokens.sum), beta(tokens.beta), q_factor(tokens.q), k_factor(tokens.k);
    const RowPair query(tokens.query), read(tokens.read), advance(tokens.advance);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      q_square[half] = q_factor[half] * q_factor[half] * delta_head, k_square[half] = k_factor[half] * k_factor[half];
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      SsdSums<64> product = {};
      add_product<delta_head, 64, false, false>(shared.d_o, shared.state + part * keys_bytes, product);
      add_scaled(product, 1, query, shared.q + part * ssd_tile_bytes, dq[part], inside);
      for (auto& one : product) one[0] = one[1] = one[2] = one[3] = 0;
      add_product<delta_head, 64, false, false>(shared.solved, shared.state + part * keys_bytes, product);
      add_scaled(product, -1, read, shared.k + part * ssd_tile_bytes, dk[part], inside);
      for (auto& one : product) one[0] = one[1] = one[2] = one[3] = 0;
      add_product<delta_head, 64, false, false>(shared.written, shared.dstate + part * keys_bytes, product);
      add_scaled(product, 1, advance, shared.k + part * ssd_tile_bytes, dk[part], shares);
    }
    inside[0] -= shares[0], inside[1] -= shares[1], totals[1] = shares[0] + shares[1];

    // Between tokens.
    SsdSums<64> pairs = {}, mixed = {};
    add_product<delta_head, 64, false, false>(shared.d_o, shared.written, pairs);
    add_product<delta_head, 64, false, false>(shared.solved, shared.written, mixed);
    float columns[8] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int half = part / 2, row = own_row() + lane / 4 + half * 8, column = own_column<64>() + j * 8 + lane % 4 * 2 + part % 2;
        const float decay = column <= row ? exp_for(in.k, sum[half] - tokens.sum[column]) * tokens.k[column] : 0.0f;
        if (column == row) shared.diagonal[row] = mixed[j][part];
        pairs[j][part] *= decay * q_factor[half];
        mixed[j][part] *= column < row ? -decay * beta[half] * k_factor[half] : 0.0f;
        const float own = pairs[j][part] * qk[j][part] + mixed[j][part] * kk[j][part];
        inside[half] += own;
        columns[2 * j + part % 2] += own;
      }
    }
    put_row_sums(inside[0], inside[1], shared.rows);
    put_column_sums(columns, shared.columns);
    // Its barrier comes after the last read of the states, which the pairs replace.
    block_sum(totals, shared.sums);
    for_each_pair<64>(pairs, [&](int i, int j, float x, float y, int) { put_pair(shared.pairs, i, j, x, y); });
    for_each_pair<64>(mixed, [&](int i, int j, float x, float y, int) { put_pair(shared.mixed, i, j, x, y); });
    __syncthreads();
    if (threadIdx.x < 32) finish_head(args, piece, head, shared, totals[0] + totals[1], sums[at]);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const char *const k = shared.k + part * ssd_tile_bytes, *const q = shared.q + part * ssd_tile_bytes;
      add_product<64, 64, false, true>(shared.pairs, k, dq[part]);
      add_product<64, 64, true, true>(shared.pairs, q, dk[part]);
      add_product<64, 64, false, true>(shared.mixed, k, dk[part]);
      add_product<64, 64, true, true>(shared.mixed, k, dk[part]);
    }
  }
  const int64_t to = piece.begin * args.dqkv_stride + key_head * delta_head;
  store_keys(dq, shared.q, q_square, shared.rows, count, static_cast<bf16*>(args.dq) + to, args.dqkv_stride);
  store_keys(dk, shared.k, k_square, shared.rows, count, static_cast<bf16*>(args.dk) + to, args.dqkv_stride);
}

}  // namespace

void sm80_bf16_gated_delta_backward(mimo_stream& stream, const mimo_gated_delta_backward_args& args) {
  const DeltaInputs in = delta_inputs(args);
  const int64_t pieces = in.pieces(), chunks_all = pieces * in.value_heads, states = chunks_all * delta_head * delta_head;
  const int64_t values = in.tokens * in.value_heads * delta_head;
  Workspace chunk_space(&stream, chunks_all * delta_chunk_bytes), state_space(&stream, 2 * states * 2), value_space(&stream, 2 * values * 2);
  Workspace sum_space(&stream, chunks_all * static_cast<int64_t>(sizeof(SsdHeadSums)));
  const DeltaStates kept{state_space.as<bf16>(), value_space.as<bf16>()};
  const Reverse reverse{kept.states + states, kept.written + values};
  SsdHeadSums* const sums = sum_space.as<SsdHeadSums>();
  const DeltaChunks chunks = sm80_bf16_gated_delta_chunks(stream, in, chunk_space.as<char>());
  sm80_bf16_gated_delta_pass(stream, in, chunks, nullptr, nullptr, &kept);
  launch(stream, reverse_kernel, grid_of(delta_head / block_columns, in.value_heads, in.sequences), dim3(ssd_block), sizeof(PassShared), in,
         chunks, static_cast<const bf16*>(args.d_o), static_cast<bf16*>(args.dv), args.dqkv_stride, reverse);
  launch(stream, gradients_kernel, grid_of(pieces, in.key_heads), dim3(ssd_block), sizeof(ChunkShared), args, in, chunks, kept, reverse, sums);
  if (args.da_log != nullptr || args.ddt_bias != nullptr) {
    ssd_add_head_sums(stream, sums, in.cu_seqlens, in.sequences, pieces, in.value_heads, ssd_chunk, nullptr, args.da_log, args.ddt_bias);
  }
}

}  // namespace mimo::cuda
