// Chunk-scan (SSD) backward without tensor cores (docs/spec/language-model.md §2.4). A block processes one chunk of a
// group and loops over its heads, so that dB and dC are summed in shared memory. Symbols as in the specification: w is
// the gradient of Δ x, c_i and b_j the terms of dC and dB that pass through states, E = dG ∘ G.
#include "ssd.h"
#include "ssd_plain.cuh"

namespace mimo::cuda {
namespace {

/// Backward of the gate o = y silu(z): writes dz, and dy in fp32.
template <class T>
__global__ void gate_kernel(mimo_ssd_backward_args args, float* dy) {
  const int64_t width = args.heads * args.head_dim;
  for_each_pack(args.tokens, width, [&](int64_t token, int64_t column) {
    const int64_t at = token * width + column;
    const float gate = load(static_cast<const T*>(args.z) + token * args.z_stride + column), s = sigmoid(gate);
    const float gradient = load(static_cast<const T*>(args.d_o) + at);
    dy[at] = gradient * gate * s;
    store(static_cast<T*>(args.dz) + token * args.dz_stride + column,
          gradient * load(static_cast<const T*>(args.y) + at) * s * (1.0f + gate * (1.0f - s)));
  });
}

/// Per-token values: cs, Δ, and the row sums of the specification.
struct TokenNumbers {
  float *sum, *step, *x_dot, *b_dot, *c_dot, *da, *ddt;
  static constexpr int count = 7;
};

template <class T>
__global__ void __launch_bounds__(ssd_threads) backward_kernel(mimo_ssd_backward_args args, SsdDecays decays,
                                                               const float* dy_all, const float* states,
                                                               const float* dstates, int64_t chunk, SsdHeadSums* sums) {
  extern __shared__ float shared_tiles[];
  __shared__ float shared_sums[3 * 32];
  const Piece piece = piece_at(args.cu_seqlens, args.sequences, chunk, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t group = blockIdx.y, heads_per_group = args.heads / args.groups;
  const int count = static_cast<int>(piece.count);
  const int p = static_cast<int>(args.head_dim), n = static_cast<int>(args.state_dim);
  SsdShared shared{shared_tiles};
  const SsdTile b = shared.tile(count, n), c = shared.tile(count, n);
  const SsdTile db = shared.tile(count, n), dc = shared.tile(count, n);
  const SsdTile x = shared.tile(count, p), dy = shared.tile(count, p), w = shared.tile(count, p);
  const SsdTile g = shared.tile(count, count), dg = shared.tile(count, count), e = shared.tile(count, count);
  const SsdTile state = shared.tile(p, n);
  float* next = shared.next;
  const auto numbers = [&] {
    float* taken = next;
    next += count;
    return taken;
  };
  const TokenNumbers of{numbers(), numbers(), numbers(), numbers(), numbers(), numbers(), numbers()};

  const int64_t row = piece.begin * args.xbc_stride + group * n;
  load_tile(static_cast<const T*>(args.b) + row, args.xbc_stride, count, n, b);
  load_tile(static_cast<const T*>(args.c) + row, args.xbc_stride, count, n, c);
  __syncthreads();
  for_each_element(count, n, [&](int i, int k) { db.at(i, k) = dc.at(i, k) = 0.0f; });
  for_each_element(count, count, [&](int i, int j) {
    float score = 0;
    if (j <= i) {
      for (int k = 0; k < n; ++k) score += c.at(i, k) * b.at(j, k);
    }
    g.at(i, j) = score;
    dg.at(i, j) = 0.0f;
  });

  for (int64_t head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
    const int64_t state_at = (blockIdx.x * args.heads + head) * p * n;
    const float a = -expf(args.a_log[head]), d = args.d[head];
    __syncthreads();
    for (int t = threadIdx.x; t < count; t += ssd_threads) {
      of.sum[t] = decays.sum[head * args.tokens + piece.begin + t];
      of.step[t] = decays.step[head * args.tokens + piece.begin + t];
    }
    load_tile(static_cast<const T*>(args.x) + piece.begin * args.xbc_stride + head * p, args.xbc_stride, count, p, x);
    load_tile(dy_all + (piece.begin * args.heads + head) * p, args.heads * p, count, p, dy);
    load_tile(dstates + state_at, n, p, n, state);
    float carried = 0;
    for (int i = threadIdx.x; i < p * n; i += ssd_threads) carried += states[state_at + i] * dstates[state_at + i];
    __syncthreads();
    const float last = of.sum[count - 1];

    // Terms through the state after the chunk.
    for_each_element(count, p, [&](int j, int k) {
      float through = 0;
      for (int m = 0; m < n; ++m) through += state.at(k, m) * b.at(j, m);
      w.at(j, k) = expf(last - of.sum[j]) * through;
    });
    for_each_element(count, n, [&](int j, int m) {
      float through = 0;
      for (int k = 0; k < p; ++k) through += x.at(j, k) * state.at(k, m);
      db.at(j, m) += expf(last - of.sum[j]) * of.step[j] * through;
    });
    __syncthreads();
    for_each_row_sum(count, p, [&](int j, int k) { return w.at(j, k) * x.at(j, k); },
                     [&](int j, float total) { of.b_dot[j] = of.step[j] * total; });
    // Terms within the chunk: E and dG.
    for_each_element(count, count, [&](int i, int j) {
      float gradient = 0;
      if (j <= i) {
        for (int k = 0; k < p; ++k) gradient += dy.at(i, k) * x.at(j, k);
        gradient *= expf(of.sum[i] - of.sum[j]) * of.step[j];
      }
      dg.at(i, j) += gradient;
      e.at(i, j) = gradient * g.at(i, j);
    });
    __syncthreads();
    for_each_element(count, p, [&](int j, int k) {
      float within = 0;
      for (int i = j; i < count; ++i) within += g.at(i, j) * expf(of.sum[i] - of.sum[j]) * dy.at(i, k);
      w.at(j, k) += within;
    });
    // Terms through the state before the chunk.
    load_tile(states + state_at, n, p, n, state);
    __syncthreads();
    for_each_element(count, p, [&](int j, int k) {
      const int64_t at = (piece.begin + j) * args.dxbc_stride + head * p + k;
      store(static_cast<T*>(args.dx) + at, of.step[j] * w.at(j, k) + d * dy.at(j, k));
    });
    for_each_row_sum(count, p, [&](int j, int k) { return w.at(j, k) * x.at(j, k); },
                     [&](int j, float total) { of.x_dot[j] = total; });
    for (int i = threadIdx.x / 32; i < count; i += ssd_threads / 32) {
      float dot = 0;
      for (int m = threadIdx.x % 32; m < n; m += 32) {
        float through = 0;
        for (int k = 0; k < p; ++k) through += dy.at(i, k) * state.at(k, m);
        through *= expf(of.sum[i]);
        dc.at(i, m) += through;
        dot += through * c.at(i, m);
      }
      dot = warp_sum(dot);
      if (threadIdx.x % 32 == 0) of.c_dot[i] = dot;
    }
    float totals[3] = {carried, 0, 0};
    for_each_element(count, p, [&](int i, int k) { totals[1] += dy.at(i, k) * x.at(i, k); });
    block_sum(totals, shared_sums);
    __syncthreads();
    // da_k = Σ_{i>=k} Σ_{j<k} E_ij + Σ_{i>=k} c_dot_i + Σ_{j<k} b_dot_j + carried
    for (int k = threadIdx.x; k < count; k += ssd_threads) {
      double da = static_cast<double>(expf(last) * totals[0]);
      for (int i = k; i < count; ++i) {
        da += of.c_dot[i];
        for (int j = 0; j < k; ++j) da += e.at(i, j);
      }
      for (int j = 0; j < k; ++j) da += of.b_dot[j];
      const int64_t token = piece.begin + k;
      const float argument = load(static_cast<const T*>(args.dt) + token * args.dt_stride + head) + args.dt_bias[head];
      const float slope = of.step[k] <= args.dt_minimum ? 0.0f : sigmoid(argument);
      const float gradient = (of.x_dot[k] + a * static_cast<float>(da)) * slope;
      of.da[k] = static_cast<float>(da) * of.step[k];
      of.ddt[k] = gradient;
      store(static_cast<T*>(args.ddt) + token * args.ddt_stride + head, gradient);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      SsdHeadSums own{totals[1], 0.0f, 0.0f};
      for (int k = 0; k < count; ++k) {
        own.a_log += a * of.da[k];
        own.dt_bias += of.ddt[k];
      }
      sums[blockIdx.x * args.heads + head] = own;
    }
  }
  __syncthreads();
  const int64_t to = piece.begin * args.dxbc_stride + group * n;
  for_each_element(count, n, [&](int t, int m) {
    float from_c = dc.at(t, m), from_b = db.at(t, m);
    for (int j = 0; j <= t; ++j) from_c += dg.at(t, j) * b.at(j, m);
    for (int i = t; i < count; ++i) from_b += dg.at(i, t) * c.at(i, m);
    store(static_cast<T*>(args.dc) + to + t * args.dxbc_stride + m, from_c);
    store(static_cast<T*>(args.db) + to + t * args.dxbc_stride + m, from_b);
  });
}

}  // namespace

void ssd_backward_plain(mimo_stream& stream, const mimo_ssd_backward_args& args) {
  const int64_t p = args.head_dim, n = args.state_dim;
  const int64_t per_token = 4 * (n + 1) + 3 * (p + 1) + TokenNumbers::count, fixed = tile_floats(p, n);
  const int64_t chunk = ssd_plain_chunk(*stream.device, args.chunk_size, per_token, 3, fixed + 128);
  const int64_t pieces = piece_count(args.tokens, args.sequences, chunk), state_floats = pieces * args.heads * p * n;
  Workspace decay_space(&stream, 2 * args.heads * args.tokens * 4);
  Workspace state_space(&stream, 2 * state_floats * 4);
  Workspace dy_space(&stream, args.tokens * args.heads * p * 4);
  Workspace sum_space(&stream, pieces * args.heads * static_cast<int64_t>(sizeof(SsdHeadSums)));
  float* const step = decay_space.as<float>();
  float* const sum = step + args.heads * args.tokens;
  float* const states = state_space.as<float>();
  float* const dstates = states + state_floats;
  float* const dy = dy_space.as<float>();
  const SsdDecays decays{step, sum};
  if (args.z_factors != nullptr) ssd_masked_gate(stream, args, dy, MIMO_DTYPE_F32);
  ssd_decays(stream, args.dt, args.dt_stride, args.dt_bias, args.a_log, args.dt_minimum, args.cu_seqlens,
             args.sequences, args.tokens, args.heads, chunk, args.dtype, step, sum);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const auto [grid, block] = cover(args.tokens, args.heads * p);
    if (args.z_factors == nullptr) launch(stream, gate_kernel<T>, grid, block, 0, args, dy);
  });
  const auto make_states = [&](const void* a, int64_t a_stride, int32_t a_dtype, const void* b, bool of_end, float* to) {
    ssd_chunk_states_plain(stream, a, a_stride, a_dtype, b, args.xbc_stride, args.dtype, decays, of_end,
                           args.cu_seqlens, args.sequences, args.tokens, args.heads, p, args.groups, n, chunk, to);
    ssd_pass(stream, !of_end, to, to, MIMO_DTYPE_F32, nullptr, sum, args.cu_seqlens, args.sequences, args.tokens, args.heads,
             p * n, chunk);
  };
  make_states(args.x, args.xbc_stride, args.dtype, args.b, true, states);
  make_states(dy, args.heads * p, MIMO_DTYPE_F32, args.c, false, dstates);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    launch(stream, backward_kernel<T>, grid_of(pieces, args.groups), dim3(ssd_threads),
           4 * (chunk * per_token + 3 * tile_floats(chunk, chunk) + fixed), args, decays, dy, states, dstates, chunk,
           sum_space.as<SsdHeadSums>());
  });
  ssd_add_head_sums(stream, sum_space.as<SsdHeadSums>(), args.cu_seqlens, args.sequences, pieces, args.heads, chunk,
                    args.dd, args.da_log, args.ddt_bias);
}

}  // namespace mimo::cuda
