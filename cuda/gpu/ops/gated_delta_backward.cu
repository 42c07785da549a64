// The gated delta rule, backward (docs/spec/families.md §2.5): a sweep that keeps the states between chunks, the chunks from the
// last to the first with the gradient of the state as carry, and sums over the blocks of columns and heads that share keys.
#include "gated_delta.cuh"

namespace mimo::cuda {
namespace {

constexpr int64_t block_columns = 64;
constexpr int most_chunk = 32;

/// fp32 results of a block of columns: gradients of the scaled unit queries and of the unit keys, [blocks, T, H_v, D_k]; of g and β,
/// [blocks, T, H_v].
struct Partials {
  float *dq, *dk, *dg, *dbeta;
};

__device__ __forceinline__ float* state_at(const mimo_gated_delta_backward_args& args, float* states, const DeltaColumns& own,
                                           int64_t piece) {
  return states + (piece * args.value_heads + own.head) * args.key_dim * args.value_dim + own.first;
}

/// The states at the starts of chunks, [pieces, H_v, D_k, D_v].
template <class T>
__global__ void states_kernel(mimo_gated_delta_backward_args args, int64_t width, int chunk, float* states) {
  extern __shared__ float shared_tiles[];
  SsdShared shared{shared_tiles};
  const int dk = static_cast<int>(args.key_dim);
  const DeltaColumns own = delta_columns(args.value_dim, width);
  const DeltaTiles t(shared, chunk, dk, static_cast<int>(width));
  const int64_t sequence = blockIdx.z, first = args.cu_seqlens[sequence], last = args.cu_seqlens[sequence + 1];
  int64_t piece = first_piece(args.cu_seqlens, sequence, chunk);
  for_each_element(dk, own.count, [&](int r, int c) { t.state.at(r, c) = 0; });
  __syncthreads();
  for (int64_t begin = first; begin < last; begin += chunk, ++piece) {
    float* const to = state_at(args, states, own, piece);
    for_each_element(dk, own.count, [&](int r, int c) { to[r * args.value_dim + c] = t.state.at(r, c); });
    if (begin + chunk >= last) break;
    delta_write<T>(args, t, own, begin, chunk);
    delta_advance(t, dk, own.count, chunk);
    __syncthreads();
  }
}

template <class T>
__global__ void backward_kernel(mimo_gated_delta_backward_args args, int64_t width, int chunk, float* states, Partials partials) {
  extern __shared__ float shared_tiles[];
  __shared__ float block_sums[32];
  // Gradients of the cumulative sum. A pair's term counts once for, once against; in double the two cancel.
  __shared__ double dsum[most_chunk];
  SsdShared shared{shared_tiles};
  const int dk = static_cast<int>(args.key_dim), columns = static_cast<int>(width);
  const DeltaColumns own = delta_columns(args.value_dim, width);
  const DeltaTiles t(shared, chunk, dk, columns);
  const SsdTile dstate = shared.tile(dk, columns), d_o = shared.tile(chunk, columns), dwritten = shared.tile(chunk, columns);
  const SsdTile value = shared.tile(chunk, columns), pair = shared.tile(chunk, chunk), mixed = shared.tile(chunk, chunk);
  float* const dbeta = shared.next;
  const int64_t sequence = blockIdx.z, first = args.cu_seqlens[sequence], last = args.cu_seqlens[sequence + 1];
  const int64_t chunks = ceil_div(last - first, chunk), block = blockIdx.x * args.tokens;
  for_each_element(dk, own.count, [&](int r, int c) { dstate.at(r, c) = 0; });
  for (int64_t number = chunks - 1; number >= 0; --number) {
    const int64_t begin = first + number * chunk;
    const int count = static_cast<int>(smaller(chunk, last - begin));
    const float* const from = state_at(args, states, own, first_piece(args.cu_seqlens, sequence, chunk) + number);
    for_each_element(dk, own.count, [&](int r, int c) { t.state.at(r, c) = from[r * args.value_dim + c]; });
    load_tile(static_cast<const T*>(args.d_o) + (begin * args.value_heads + own.head) * args.value_dim + own.first,
              args.value_heads * args.value_dim, count, own.count, d_o);
    __syncthreads();
    delta_write<T>(args, t, own, begin, count);

    // W: from O through Q Kᵀ ⊙ Γ, and from the state at the end; the gradient of Q Kᵀ ⊙ Γ, times Γ.
    for_each_element(count, own.count, [&](int i, int c) {
      float within = 0, through = 0;
      for (int j = i; j < count; ++j) within += t.qk.at(j, i) * t.gamma.at(j, i) * d_o.at(j, c);
      for (int r = 0; r < dk; ++r) through += t.k.at(i, r) * dstate.at(r, c);
      value.at(i, c) = t.to_end[i] * through;
      dwritten.at(i, c) = within + t.to_end[i] * through;
    });
    for_each_element(count, count, [&](int i, int j) {
      float sum = 0;
      if (j <= i) {
        for (int c = 0; c < own.count; ++c) sum += d_o.at(i, c) * t.written.at(j, c);
      }
      pair.at(i, j) = sum * t.gamma.at(i, j);
    });
    float end[1] = {0};
    for_each_element(dk, own.count, [&](int r, int c) { end[0] += dstate.at(r, c) * t.state.at(r, c); });
    block_sum(end, block_sums);
    __syncthreads();
    for_each_row_sum(count, own.count, [&](int i, int c) { return value.at(i, c) * t.written.at(i, c); },
                     [&](int i, float sum) { dsum[i] = sum; });
    __syncthreads();
    if (threadIdx.x == 0) {
      double at_end = t.from_start[count - 1] * end[0];
      for (int i = 0; i < count; ++i) at_end += dsum[i], dsum[i] = -dsum[i];
      dsum[count - 1] += at_end;
    }
    // The triangular system.
    for (int c = threadIdx.x; c < own.count; c += ssd_threads) {
      for (int i = count - 2; i >= 0; --i) {
        float sum = 0;
        for (int j = i + 1; j < count; ++j) sum += t.beta[j] * t.kk.at(j, i) * t.gamma.at(j, i) * dwritten.at(j, c);
        dwritten.at(i, c) -= sum;
      }
    }
    __syncthreads();
    for_each_element(count, count, [&](int i, int j) {
      float sum = 0;
      if (j < i) {
        for (int c = 0; c < own.count; ++c) sum += dwritten.at(i, c) * t.written.at(j, c);
      }
      mixed.at(i, j) = -sum * t.gamma.at(i, j);
    });
    for_each_row_sum(count, own.count, [&](int i, int c) { return dwritten.at(i, c) * t.error.at(i, c); },
                     [&](int i, float sum) { dbeta[i] = sum; });
    __syncthreads();
    if (threadIdx.x < count) {
      const int i = static_cast<int>(threadIdx.x);
      const auto product = [](double x, double y) { return x * y; };
      double difference = 0, own_pairs = 0;
      for (int j = 0; j < count; ++j) {
        difference += product(pair.at(i, j), t.qk.at(i, j)) - product(pair.at(j, i), t.qk.at(j, i));
        difference -= t.beta[j] * static_cast<double>(mixed.at(j, i) * t.kk.at(j, i));
        own_pairs += mixed.at(i, j) * t.kk.at(i, j);
      }
      dbeta[i] += static_cast<float>(own_pairs);
      dsum[i] += difference + t.beta[i] * own_pairs;
    }
    __syncthreads();
    // dwritten becomes the gradient of V - e^b K S.
    T* const dv = static_cast<T*>(args.dv) + begin * args.dqkv_stride + own.head * args.value_dim + own.first;
    for_each_element(count, own.count, [&](int i, int c) {
      const float gradient = t.beta[i] * dwritten.at(i, c);
      dwritten.at(i, c) = gradient;
      store(dv + i * args.dqkv_stride + c, gradient);
    });
    for_each_element(count, count, [&](int i, int j) { mixed.at(i, j) *= t.beta[i]; });
    __syncthreads();
    const int64_t keys = ((block + begin) * args.value_heads + own.head) * dk, next = args.value_heads * dk;
    for_each_row_sum(
        count, dk,
        [&](int i, int r) {
          float q_state = 0, k_state = 0, k_end = 0, dq = 0, dkey = 0;
          for (int c = 0; c < own.count; ++c) {
            q_state += d_o.at(i, c) * t.state.at(r, c);
            k_state += dwritten.at(i, c) * t.state.at(r, c);
            k_end += t.written.at(i, c) * dstate.at(r, c);
          }
          q_state *= t.from_start[i];
          k_state *= t.from_start[i];
          for (int j = 0; j <= i; ++j) {
            dq += pair.at(i, j) * t.k.at(j, r);
            dkey += mixed.at(i, j) * t.k.at(j, r);
          }
          for (int j = i; j < count; ++j) dkey += pair.at(j, i) * t.q.at(j, r) + mixed.at(j, i) * t.k.at(j, r);
          partials.dq[keys + i * next + r] = q_state + dq;
          partials.dk[keys + i * next + r] = t.to_end[i] * k_end - k_state + dkey;
          return q_state * t.q.at(i, r) - k_state * t.k.at(i, r);
        },
        [&](int i, float sum) { dsum[i] += sum; });
    __syncthreads();
    const float total = t.from_start[count - 1];
    for_each_element(dk, own.count, [&](int r, int c) {
      float sum = total * dstate.at(r, c);
      for (int i = 0; i < count; ++i) {
        sum += t.from_start[i] * (t.q.at(i, r) * d_o.at(i, c) - t.k.at(i, r) * dwritten.at(i, c));
      }
      dstate.at(r, c) = sum;
    });
    if (threadIdx.x == 0) {
      double running = 0;
      for (int i = count - 1; i >= 0; --i) dsum[i] = running += dsum[i];
    }
    __syncthreads();
    if (threadIdx.x < count) {
      const int64_t at = (block + begin + threadIdx.x) * args.value_heads + own.head;
      partials.dg[at] = static_cast<float>(dsum[threadIdx.x]);
      partials.dbeta[at] = dbeta[threadIdx.x];
    }
    __syncthreads();
  }
}

/// Gradients of b, a, dt_bias and A_log; a block owns a head.
template <class T>
__global__ void decays_kernel(mimo_gated_delta_backward_args args, int64_t blocks, Partials partials) {
  __shared__ double block_sums[64];
  const int64_t head = blockIdx.x;
  const float rate = -expf(args.a_log[head]), bias = args.dt_bias[head];
  double sums[2] = {0, 0};
  for (int64_t token = threadIdx.x; token < args.tokens; token += blockDim.x) {
    float dg = 0, dbeta = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = (block * args.tokens + token) * args.value_heads + head;
      dg += partials.dg[at];
      dbeta += partials.dbeta[at];
    }
    const int64_t from = token * args.ba_stride + head, to = token * args.dba_stride + head;
    const float beta = sigmoid(load(static_cast<const T*>(args.b) + from));
    const float argument = load(static_cast<const T*>(args.a) + from) + bias;
    const float da = dg * rate * sigmoid(argument);
    store(static_cast<T*>(args.db) + to, dbeta * beta * (1.0f - beta));
    store(static_cast<T*>(args.da) + to, da);
    sums[0] += da;
    sums[1] += dg * rate * softplus(argument);
  }
  block_sum(sums, block_sums);
  if (threadIdx.x != 0) return;
  if (args.ddt_bias != nullptr) args.ddt_bias[head] += static_cast<float>(sums[0]);
  if (args.da_log != nullptr) args.da_log[head] += static_cast<float>(sums[1]);
}

/// Gradients of q and k through their normalisation: dx = f (dx̂ - x̂ (x̂·dx̂)), x̂ = x f. A warp owns a token and key head.
template <class T>
__global__ void keys_kernel(mimo_gated_delta_backward_args args, int64_t blocks, Partials partials) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= args.tokens * args.key_heads) return;
  const int64_t token = row / args.key_heads, head = row % args.key_heads, dk = args.key_dim;
  const int64_t heads = args.value_heads / args.key_heads;
  const int lane = threadIdx.x % 32;
  const auto differentiate = [&](const void* from, float* partial, float scale, void* to) {
    const T* const x = static_cast<const T*>(from) + token * args.qkv_stride + head * dk;
    const auto gradient = [&](int64_t r) {
      float sum = 0;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = (block * args.tokens + token) * args.value_heads + head * heads;
        for (int64_t value = 0; value < heads; ++value) sum += partial[(first + value) * dk + r];
      }
      return scale * sum;
    };
    float squares = 0, along = 0;
    for (int64_t r = lane; r < dk; r += 32) {
      const float own = load(x + r);
      squares += own * own;
      along += own * gradient(r);
    }
    const float factor = 1.0f / sqrtf(warp_sum(squares) + 1e-6f);
    along = factor * factor * warp_sum(along);
    T* const dx = static_cast<T*>(to) + token * args.dqkv_stride + head * dk;
    for (int64_t r = lane; r < dk; r += 32) store(dx + r, factor * (gradient(r) - load(x + r) * along));
  };
  differentiate(args.q, partials.dq, 1.0f / sqrtf(static_cast<float>(dk)), args.dq);
  differentiate(args.k, partials.dk, 1.0f, args.dk);
}

}  // namespace

void gated_delta_backward(mimo_stream& stream, const mimo_gated_delta_backward_args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.value_heads % args.key_heads == 0, "gated_delta_backward");
  MIMO_REQUIRE(args.key_dim > 0 && args.value_dim > 0, "gated_delta_backward");
  if (args.tokens == 0) return;
  const int64_t qkv = args.qkv_stride, dqkv = args.dqkv_stride;
  if (fits_sm80_bf16(stream, args, {{args.q, qkv}, {args.k, qkv}, {args.v, qkv}, {args.d_o, args.value_heads * args.value_dim},
                                    {args.dq, dqkv}, {args.dk, dqkv}, {args.dv, dqkv}})) {
    return fits_sm90(stream, args) ? sm90_bf16_gated_delta_backward(stream, args) : sm80_bf16_gated_delta_backward(stream, args);
  }
  const int64_t dk = args.key_dim, width = smaller(args.value_dim, block_columns), blocks = ceil_div(args.value_dim, width);
  const int64_t state = tile_floats(dk, width), shared_token = delta_floats_of_token(dk, width);
  const int64_t per_token = shared_token + 3 * (width + 1) + 1, per_pair = delta_floats_of_pair + 2;
  const int64_t chunk = ssd_plain_chunk(*stream.device, most_chunk, per_token, per_pair, 2 * state);
  const int64_t pairs = tile_floats(chunk, chunk), pieces = piece_count(args.tokens, args.sequences, chunk);
  const int64_t rows = blocks * args.tokens * args.value_heads;
  Workspace state_space(&stream, pieces * args.value_heads * dk * args.value_dim * 4);
  Workspace partial_space(&stream, 2 * rows * (dk + 1) * 4);
  float* const memory = partial_space.as<float>();
  const Partials partials{memory, memory + rows * dk, memory + 2 * rows * dk, memory + 2 * rows * dk + rows};
  float* const states = state_space.as<float>();
  const dim3 grid = grid_of(blocks, args.value_heads, args.sequences);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    launch(stream, states_kernel<T>, grid, dim3(ssd_threads), 4 * (state + chunk * shared_token + delta_floats_of_pair * pairs),
           args, width, chunk, states);
    launch(stream, backward_kernel<T>, grid, dim3(ssd_threads), 4 * (2 * state + chunk * per_token + per_pair * pairs), args, width,
           chunk, states, partials);
    launch(stream, decays_kernel<T>, grid_of(args.value_heads), dim3(256), 0, args, blocks, partials);
    launch(stream, keys_kernel<T>, grid_of(ceil_div(args.tokens * args.key_heads, 8)), dim3(256), 0, args, blocks, partials);
  });
}

}  // namespace mimo::cuda
