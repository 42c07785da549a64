// The pass over the states of the gated delta rule, and its forward direction (gated_delta.h). A block carries 64 columns of a
// value head's state, which are independent of the others, through a sequence: in fp32 in registers, in bf16 as an operand.
#include "sm80_gated_delta.cuh"

namespace mimo::cuda {
namespace {

constexpr int block_columns = 64, keys_bytes = 2 * ssd_tile_bytes;

/// A step's inputs, fetched during the step before.
template <bool Output>
struct Stage {
  char k[keys_bytes], inverse[ssd_tile_bytes], v[ssd_tile_bytes];
  char q[Output ? keys_bytes : 16], pairs[Output ? ssd_tile_bytes : 16];
  DeltaSteps tokens;
};
template <bool Output>
struct Shared {
  Stage<Output> stage[2];
  char state[keys_bytes];  // rows 64 .. 127 follow the first
  char error[ssd_tile_bytes], written[ssd_tile_bytes], advance[ssd_tile_bytes];
  char output[Output ? ssd_tile_bytes : 16];
};

template <bool Output, bool Keep>
__global__ void __launch_bounds__(ssd_block) pass_kernel(DeltaInputs in, DeltaChunks chunks, bf16* o, float* final_state, DeltaStates keep) {
  extern __shared__ __align__(128) char memory[];
  Shared<Output>& shared = *reinterpret_cast<Shared<Output>*>(memory);
  const int64_t column = blockIdx.x * block_columns, head = blockIdx.y, sequence = blockIdx.z;
  const int64_t first = in.cu_seqlens[sequence], last = in.cu_seqlens[sequence + 1], width = in.value_heads * delta_head;
  const int64_t key_column = head / (in.value_heads / in.key_heads) * delta_head, own_column_of_v = head * delta_head + column;
  const int64_t piece = first_piece(in.cu_seqlens, sequence, ssd_chunk);
  const int steps = static_cast<int>(ceil_div(last - first, ssd_chunk));
  const auto count_of = [&](int step) { return static_cast<int>(smaller(ssd_chunk, last - first - step * ssd_chunk)); };
  const auto fetch = [&](int step) {
    Stage<Output>& to = shared.stage[step % 2];
    const int count = count_of(step);
    const int64_t begin = first + step * ssd_chunk, at = (piece + step) * in.value_heads + head;
    fetch_rows(in.k + begin * in.qkv_stride + key_column, in.qkv_stride, count, delta_head, to.k);
    fetch_rows(in.v + begin * in.qkv_stride + own_column_of_v, in.qkv_stride, count, block_columns, to.v);
    fetch_bytes(chunks.inverse + at * delta_tile, ssd_tile_bytes, to.inverse);
    if constexpr (Output) {
      fetch_rows(in.q + begin * in.qkv_stride + key_column, in.qkv_stride, count, delta_head, to.q);
      fetch_bytes(chunks.pairs + at * delta_tile, ssd_tile_bytes, to.pairs);
    }
    fetch_bytes(chunks.tokens + at, sizeof(DeltaSteps), &to.tokens);
    copy_commit();
  };
  SsdSums<64> state[2] = {};
  for (int index = threadIdx.x; index < keys_bytes / 16; index += ssd_block) reinterpret_cast<uint4*>(shared.state)[index] = uint4{};
  if (steps > 0) fetch(0);
  for (int step = 0; step < steps; ++step) {
    copy_wait<0>();
    __syncthreads();
    const Stage<Output>& now = shared.stage[step % 2];
    const int64_t begin = first + step * ssd_chunk;
    if (step + 1 < steps) fetch(step + 1);
    if (Output && step > 0) store_rows(shared.output, ssd_chunk, o + (begin - ssd_chunk) * width + own_column_of_v, width);
    if constexpr (Keep) {
      bf16* const to = keep.states + ((piece + step) * in.value_heads + head) * delta_head * delta_head + column;
      store_rows(shared.state, ssd_chunk, to, delta_head);
      store_rows(shared.state + ssd_tile_bytes, ssd_chunk, to + ssd_chunk * delta_head, delta_head);
    }
    const RowPair beta(now.tokens.beta), read(now.tokens.read), query(now.tokens.query), advance(now.tokens.advance);
    const float total = decay_of(now.tokens);
    SsdSums<64> written = {};
    add_product<delta_head, 64, false, true>(now.k, shared.state, written);
    for_each_pair<64>(written, [&](int i, int c, float& x, float& y, int half) {
      const uint32_t v = pair_at(now.v, i, c);
      x = beta[half] * lower_bf16(v) - read[half] * x, y = beta[half] * upper_bf16(v) - read[half] * y;
      put_pair(shared.error, i, c, x, y);
    });
    SsdSums<64> output = {};
    if constexpr (Output) {
      add_product<delta_head, 64, false, true>(now.q, shared.state, output);
      for_each_pair<64>(output, [&](int, int, float& x, float& y, int half) { x *= query[half], y *= query[half]; });
    }
    __syncthreads();
    add_product<64, 64, false, true>(now.inverse, shared.error, written);
    for_each_pair<64>(written, [&](int i, int c, float x, float y, int half) {
      put_pair(shared.written, i, c, x, y);
      put_pair(shared.advance, i, c, advance[half] * x, advance[half] * y);
    });
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (auto& sums : state[half]) {
        for (float& x : sums) x *= total;
      }
      add_product<64, 64, true, true>(now.k + half * ssd_tile_bytes, shared.advance, state[half]);
      for_each_pair<64>(state[half], [&](int r, int c, float x, float y, int) {
        put_pair(shared.state + half * ssd_tile_bytes, r, c, x, y);
      });
    }
    if constexpr (Output) {
      add_product<64, 64, false, true>(now.pairs, shared.written, output);
      for_each_pair<64>(output, [&](int i, int c, float x, float y, int) { put_pair(shared.output, i, c, x, y); });
    }
    if constexpr (Keep) store_rows(shared.written, count_of(step), keep.written + begin * width + own_column_of_v, width);
  }
  if (Output && steps > 0) {
    __syncthreads();
    store_rows(shared.output, count_of(steps - 1), o + (first + (steps - 1) * ssd_chunk) * width + own_column_of_v, width);
  }
  if (final_state == nullptr) return;
  float* const to = final_state + (sequence * in.value_heads + head) * delta_head * delta_head + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for_each_pair<64>(state[half], [&](int r, int c, float x, float y, int) {
      *reinterpret_cast<float2*>(to + (half * ssd_chunk + r) * delta_head + c) = make_float2(x, y);
    });
  }
}

}  // namespace

static_assert(sizeof(Shared<true>) == gated_delta_shared_bytes);

void sm80_bf16_gated_delta_pass(mimo_stream& stream, const DeltaInputs& in, const DeltaChunks& chunks, bf16* o, float* final_state,
                                const DeltaStates* keep) {
  const dim3 grid = grid_of(delta_head / block_columns, in.value_heads, in.sequences);
  if (keep != nullptr) {
    launch(stream, pass_kernel<false, true>, grid, dim3(ssd_block), sizeof(Shared<false>), in, chunks, o, final_state, *keep);
  } else {
    launch(stream, pass_kernel<true, false>, grid, dim3(ssd_block), sizeof(Shared<true>), in, chunks, o, final_state, DeltaStates{});
  }
}

void sm80_bf16_gated_delta_forward(mimo_stream& stream, const mimo_gated_delta_forward_args& args) {
  const DeltaInputs in = delta_inputs(args);
  Workspace space(&stream, in.pieces() * in.value_heads * delta_chunk_bytes);
  const DeltaChunks chunks = sm80_bf16_gated_delta_chunks(stream, in, space.as<char>());
  sm80_bf16_gated_delta_pass(stream, in, chunks, static_cast<bf16*>(args.o), args.final_state, nullptr);
}

}  // namespace mimo::cuda
