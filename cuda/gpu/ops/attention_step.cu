// Decode attention: one new token of each sequence against its cached keys and values (docs/spec/language-model.md §3).
// Split-KV (Dao et al., Flash-Decoding): a block computes a run of keys for query heads of one key head, all of them if
// they are few, so that keys and values are read once; a second kernel combines the runs' partial results. A few long sequences thus occupy
// the GPU.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 128, keys_per_run = 128;  // one key for each thread
constexpr int queries_at_once = 8;                // limited by accumulators in registers
constexpr int queries_per_block = 32;             // limited by shared memory

struct Parts {
  float2* scales;  // [S, query_heads, runs]: maximum (base 2) and Σ 2^(s - maximum)
  float* sums;     // [S, query_heads, runs, value_dim]: Σ 2^(s - maximum) v
  int64_t runs;
};

/// First key that the new token of a sequence of `length` tokens, itself among them, sees.
__device__ __forceinline__ int64_t first_seen(const mimo_attention_step_args& args, int64_t length) {
  return args.window > 0 && args.window < length ? length - args.window : 0;
}

template <class T, int Width>
__global__ void __launch_bounds__(threads) runs_kernel(mimo_attention_step_args args, Parts parts) {
  extern __shared__ float shared[];
  const int64_t run = blockIdx.x, sequence = blockIdx.z, d = args.head_dim, e = args.value_dim, apart = args.value_stride;
  const int64_t of_group = args.query_heads / args.key_heads, blocks = ceil_div(of_group, queries_per_block);
  const int64_t group = blockIdx.y / blocks, first_query = blockIdx.y % blocks * queries_per_block;
  const int64_t length = args.lengths[sequence] + 1, first = first_seen(args, length) + run * keys_per_run;
  if (first >= length) return;
  const int queries = static_cast<int>(smaller(queries_per_block, of_group - first_query));
  const int count = static_cast<int>(smaller(keys_per_run, length - first));
  float* const q = shared;               // [queries, d]
  float* const scores = q + queries * d;  // [queries, keys_per_run]
  const int64_t row = group * args.rows + args.first_rows[sequence];
  T* const keys = static_cast<T*>(args.keys) + row * d;
  T* const values = static_cast<T*>(args.values) + row * apart;
  const int64_t token = sequence * args.token_stride + group * args.group_stride;
  if (first + count == length) {
    // Blocks of the same key head write the same bits.
    for (int64_t i = threadIdx.x; i < d; i += threads) keys[(length - 1) * d + i] = static_cast<const T*>(args.k)[token + i];
    for (int64_t i = threadIdx.x; i < e; i += threads) {
      values[(length - 1) * apart + i] = static_cast<const T*>(args.v)[token + i];
    }
  }
  for (int64_t i = threadIdx.x; i < queries * d; i += threads) {
    q[i] = load(static_cast<const T*>(args.q) + token + first_query * d + i) * args.softmax_scale * log2_e;
  }
  __syncthreads();

  const int own = threadIdx.x;
  for (int base = 0; base < queries; base += queries_at_once) {
    float sum[queries_at_once] = {};
    if (own < count) {
      const T* const key = keys + (first + own) * d;
      for (int64_t i = 0; i < d; i += Width) {
        float value[Width];
        read(key + i, value);
#pragma unroll
        for (int r = 0; r < queries_at_once; ++r) {
          if (base + r >= queries) break;
#pragma unroll
          for (int w = 0; w < Width; ++w) sum[r] += value[w] * q[(base + r) * d + i + w];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < queries_at_once; ++r) {
      if (base + r < queries) scores[(base + r) * keys_per_run + own] = own < count ? sum[r] : -INFINITY;
    }
  }
  __syncthreads();

  const int64_t at = (sequence * args.query_heads + group * of_group + first_query) * parts.runs + run;
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < queries; r += threads / 32) {
    float* const mine = scores + r * keys_per_run;
    float maximum = -INFINITY, sum = 0;
    for (int j = lane; j < count; j += 32) maximum = fmaxf(maximum, mine[j]);
    maximum = warp_max(maximum);
    for (int j = lane; j < count; j += 32) {
      const float p = exp2f(mine[j] - maximum);
      mine[j] = p;
      sum += p;
    }
    sum = warp_sum(sum);
    if (lane == 0) parts.scales[at + r * parts.runs] = make_float2(maximum, sum);
  }
  __syncthreads();

  for (int64_t column = threadIdx.x; column < e; column += threads) {
    for (int base = 0; base < queries; base += queries_at_once) {
      float sum[queries_at_once] = {};
      for (int j = 0; j < count; ++j) {
        const float value = load(values + (first + j) * apart + column);
#pragma unroll
        for (int r = 0; r < queries_at_once; ++r) {
          if (base + r < queries) sum[r] += scores[(base + r) * keys_per_run + j] * value;
        }
      }
#pragma unroll
      for (int r = 0; r < queries_at_once; ++r) {
        if (base + r < queries) parts.sums[(at + (base + r) * parts.runs) * e + column] = sum[r];
      }
    }
  }
}

/// Combines the partial results of a query head's runs.
template <class T>
__global__ void __launch_bounds__(threads) join_kernel(mimo_attention_step_args args, Parts parts) {
  const int64_t head = blockIdx.x, sequence = blockIdx.y, e = args.value_dim;
  const int64_t length = args.lengths[sequence] + 1;
  const int64_t runs = ceil_div(length - first_seen(args, length), keys_per_run);
  const int64_t at = (sequence * args.query_heads + head) * parts.runs;
  float maximum = -INFINITY, sum = 0;
  for (int64_t run = 0; run < runs; ++run) maximum = fmaxf(maximum, parts.scales[at + run].x);
  for (int64_t run = 0; run < runs; ++run) {
    const float2 scale = parts.scales[at + run];
    sum += exp2f(scale.x - maximum) * scale.y;
  }
  float kept = 1;
  if (args.sinks != nullptr) {
    kept = sigmoid(maximum * ln_2 + logf(sum) - load(static_cast<const T*>(args.sinks) + head));
  }
  for (int64_t column = threadIdx.x; column < e; column += threads) {
    float total = 0;
    for (int64_t run = 0; run < runs; ++run) {
      total += exp2f(parts.scales[at + run].x - maximum) * parts.sums[(at + run) * e + column];
    }
    T* const o = static_cast<T*>(args.o) + (sequence * args.query_heads + head) * e + column;
    // Rounded as by attention_sinks_forward, so that a step gives what a whole sequence gives.
    store(o, args.sinks == nullptr ? total / sum : kept * rounded(o, total / sum));
  }
}

}  // namespace

void attention_step(mimo_stream& stream, const mimo_attention_step_args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.query_heads % args.key_heads == 0, "attention_step");
  MIMO_REQUIRE(args.head_dim > 0 && args.value_dim > 0 && args.value_stride >= args.value_dim && args.sequences >= 0 && args.max_length >= 0 && args.window >= 0, "attention_step");
  const int64_t d = args.head_dim, of_group = args.query_heads / args.key_heads;
  const int64_t queries = smaller(of_group, queries_per_block), blocks = args.key_heads * ceil_div(of_group, queries_per_block);
  const int64_t runs = ceil_div(args.max_length + 1, keys_per_run), heads = args.sequences * args.query_heads;
  Workspace scales(&stream, heads * runs * static_cast<int64_t>(sizeof(float2)));
  Workspace sums(&stream, heads * runs * args.value_dim * static_cast<int64_t>(sizeof(float)));
  const Parts parts{scales.as<float2>(), sums.as<float>(), runs};
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_width<vector_width<T>>(packs_fit<T>(args.keys, d, d, vector_width<T>), [&](auto width) {
      launch(stream, runs_kernel<T, width>, grid_of(runs, blocks, args.sequences), dim3(threads),
             4 * queries * (d + keys_per_run), args, parts);
    });
    launch(stream, join_kernel<T>, grid_of(args.query_heads, args.sequences), dim3(threads), 0, args, parts);
  });
}

}  // namespace mimo::cuda
