// The gated delta rule in chunks without tensor cores (docs/spec/families.md §2.5): fp32 tiles in shared memory, one thread an
// output element. A block carries some columns of a value head's state, which are independent of the others, through a sequence.
// Symbols and products as in ../../cpu/ops/gated_delta.h.
#pragma once
#include <initializer_list>
#include <utility>

#include "gated_delta.h"
#include "ssd_plain.cuh"
#include "tensor_map.h"

namespace mimo::cuda {

/// Whether the tensor-core kernels support these arguments; `rows` are the matrices that need 16-byte aligned rows.
template <class Args>
bool fits_sm80_bf16(const mimo_stream& stream, const Args& args, std::initializer_list<std::pair<const void*, int64_t>> rows) {
  if (args.dtype != MIMO_DTYPE_BF16 || args.key_dim != 128 || args.value_dim != 128 || args.sequences > 65535) return false;
  // Descriptors of TMA need addresses, which empty tensors lack.
  if (args.tokens == 0) return false;
  if (stream.device->shared_bytes_per_block < gated_delta_shared_bytes) return false;
  for (const auto& [pointer, stride] : rows) {
    if (!packs_fit<bf16>(pointer, 128, stride, 8)) return false;
  }
  return true;
}

/// Whether Hopper's kernels support arguments that fit tensor cores: TMA coordinates stay below ragged_end rows.
template <class Args>
bool fits_sm90(const mimo_stream& stream, const Args& args) {
#ifdef MIMO_HAS_SM90A
  return stream.device->compute_major == 9 && args.tokens < ragged_end;
#else
  return false;
#endif
}

/// Tiles of a chunk that both directions have, and per-token values.
struct DeltaTiles {
  SsdTile state, q, k, error, written, kk, qk, gamma;
  // The cumulative sum of g is large under a strong decay beside the differences that count: sum_low is what fp32 cuts off it.
  float *sum, *sum_low, *from_start, *to_end, *beta, *q_factor, *k_factor;

  __device__ DeltaTiles(SsdShared& shared, int chunk, int dk, int columns)
      : state(shared.tile(dk, columns)),
        q(shared.tile(chunk, dk)),
        k(shared.tile(chunk, dk)),
        error(shared.tile(chunk, columns)),
        written(shared.tile(chunk, columns)),
        kk(shared.tile(chunk, chunk)),
        qk(shared.tile(chunk, chunk)),
        gamma(shared.tile(chunk, chunk)),
        sum(shared.next),
        sum_low(sum + chunk),
        from_start(sum_low + chunk),
        to_end(from_start + chunk),
        beta(to_end + chunk),
        q_factor(beta + chunk),
        k_factor(q_factor + chunk) {
    shared.next = k_factor + chunk;
  }

  /// The sum of g from token j + 1 to token i.
  __device__ __forceinline__ float between(int i, int j) const { return (sum[i] - sum[j]) + (sum_low[i] - sum_low[j]); }
};

/// Floats of DeltaTiles, for ssd_plain_chunk.
constexpr int64_t delta_floats_of_token(int64_t dk, int64_t columns) { return 2 * (dk + 1) + 2 * (columns + 1) + 7; }
constexpr int64_t delta_floats_of_pair = 3;

/// Columns [first, first + count) of a value head.
struct DeltaColumns {
  int64_t head;
  int first, count;
};
__device__ __forceinline__ DeltaColumns delta_columns(int64_t value_dim, int64_t width) {
  const int64_t first = blockIdx.x * width;
  return {blockIdx.y, static_cast<int>(first), static_cast<int>(smaller(width, value_dim - first))};
}

/// Everything up to W of a chunk, from the state at its start. Ends with a barrier.
template <class T, class Args>
__device__ void delta_write(const Args& args, const DeltaTiles& t, const DeltaColumns& own, int64_t begin, int count) {
  const int dk = static_cast<int>(args.key_dim);
  const int64_t at = begin * args.qkv_stride + own.head / (args.value_heads / args.key_heads) * dk;
  load_tile(static_cast<const T*>(args.k) + at, args.qkv_stride, count, dk, t.k);
  load_tile(static_cast<const T*>(args.q) + at, args.qkv_stride, count, dk, t.q);
  if (threadIdx.x < count) {
    const int64_t ba = (begin + threadIdx.x) * args.ba_stride + own.head;
    t.beta[threadIdx.x] = sigmoid(load(static_cast<const T*>(args.b) + ba));
    t.sum[threadIdx.x] =
        -expf(args.a_log[own.head]) * softplus(load(static_cast<const T*>(args.a) + ba) + args.dt_bias[own.head]);
  }
  __syncthreads();
  const float scale = 1.0f / sqrtf(static_cast<float>(dk));
  for_each_row_sum(count, dk, [&](int i, int r) { return t.k.at(i, r) * t.k.at(i, r); },
                   [&](int i, float sum) { t.k_factor[i] = 1.0f / sqrtf(sum + 1e-6f); });
  for_each_row_sum(count, dk, [&](int i, int r) { return t.q.at(i, r) * t.q.at(i, r); },
                   [&](int i, float sum) { t.q_factor[i] = scale / sqrtf(sum + 1e-6f); });
  if (threadIdx.x == 0) {
    double running = 0;
    for (int i = 0; i < count; ++i) {
      running += t.sum[i];
      t.sum[i] = static_cast<float>(running);
      t.sum_low[i] = static_cast<float>(running - t.sum[i]);
    }
  }
  __syncthreads();
  for_each_element(count, dk, [&](int i, int r) {
    t.k.at(i, r) *= t.k_factor[i];
    t.q.at(i, r) *= t.q_factor[i];
  });
  if (threadIdx.x < count) {
    t.from_start[threadIdx.x] = expf(t.sum[threadIdx.x]);
    t.to_end[threadIdx.x] = expf(t.between(count - 1, static_cast<int>(threadIdx.x)));
  }
  __syncthreads();
  for_each_element(count, count, [&](int i, int j) {
    float kk = 0, qk = 0;
    if (j <= i) {
      for (int r = 0; r < dk; ++r) {
        kk += t.k.at(i, r) * t.k.at(j, r);
        qk += t.q.at(i, r) * t.k.at(j, r);
      }
    }
    t.kk.at(i, j) = kk;
    t.qk.at(i, j) = qk;
    t.gamma.at(i, j) = j <= i ? expf(t.between(i, j)) : 0.0f;
  });
  const T* const v = static_cast<const T*>(args.v) + begin * args.qkv_stride + own.head * args.value_dim + own.first;
  for_each_element(count, own.count, [&](int i, int c) {
    float read = 0;
    for (int r = 0; r < dk; ++r) read += t.k.at(i, r) * t.state.at(r, c);
    const float error = load(v + i * args.qkv_stride + c) - t.from_start[i] * read;
    t.error.at(i, c) = error;
    t.written.at(i, c) = t.beta[i] * error;
  });
  __syncthreads();
  for (int c = threadIdx.x; c < own.count; c += ssd_threads) {
    for (int i = 1; i < count; ++i) {
      float sum = 0;
      for (int j = 0; j < i; ++j) sum += t.kk.at(i, j) * t.gamma.at(i, j) * t.written.at(j, c);
      t.written.at(i, c) -= t.beta[i] * sum;
    }
  }
  __syncthreads();
}

/// The state at the chunk's end. To be called, and followed, with a barrier.
__device__ __forceinline__ void delta_advance(const DeltaTiles& t, int dk, int columns, int count) {
  const float total = t.from_start[count - 1];
  for_each_element(dk, columns, [&](int r, int c) {
    float sum = total * t.state.at(r, c);
    for (int i = 0; i < count; ++i) sum += t.k.at(i, r) * t.to_end[i] * t.written.at(i, c);
    t.state.at(r, c) = sum;
  });
}

}  // namespace mimo::cuda
