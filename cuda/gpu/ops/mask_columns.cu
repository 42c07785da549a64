// Columns times factors that rings of columns share (docs/spec/elastic.md §9), and router logits of masked experts (§10).
// The sums of a ring's gradient are cut by sizes alone and added in order.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

constexpr float blocked_logit = -1e30f;

__device__ __forceinline__ float factor_of(const int32_t* rings, const float* values, int64_t column) {
  const int32_t ring = rings == nullptr ? 0 : rings[column];
  return ring < 0 ? 1.0f : values[ring];
}

template <class T, int Width>
__global__ void forward_kernel(mimo_mask_columns_forward_args args) {
  for_each_pack(live_rows(args.rows, args.row_count), args.width / Width, [&](int64_t row, int64_t pack) {
    const int64_t column = pack * Width;
    float value[Width];
    read(static_cast<const T*>(args.x) + row * args.x_stride + column, value);
#pragma unroll
    for (int i = 0; i < Width; ++i) value[i] *= factor_of(args.rings, args.values, column + i);
    write(static_cast<T*>(args.y) + row * args.y_stride + column, value);
  });
}

constexpr int64_t rows_per_partial = 128;
constexpr int row_lanes = 8;

/// dx, and partial[blockIdx.y][c] = Σ over the block's rows of dy x; 32 packs of columns by 8 lanes of rows.
template <class G, class T, int Width>
__global__ void backward_kernel(mimo_mask_columns_backward_args args, float* partial) {
  __shared__ float shared[row_lanes][32 * Width + 1];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * Width;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_partial;
  const int64_t end = smaller(begin + rows_per_partial, live_rows(args.rows, args.row_count));
  // Nothing reads the partials of rows that are not live.
  if (begin >= end) return;
  float sum[Width] = {};
  if (column < args.width) {
    float factor[Width];
#pragma unroll
    for (int i = 0; i < Width; ++i) factor[i] = factor_of(args.rings, args.values, column + i);
    for (int64_t row = begin + threadIdx.y; row < end; row += row_lanes) {
      float gradient[Width];
      read(static_cast<const G*>(args.dy) + row * args.dy_stride + column, gradient);
      if (args.dvalues != nullptr) {
        float value[Width];
        read(static_cast<const T*>(args.x) + row * args.x_stride + column, value);
#pragma unroll
        for (int i = 0; i < Width; ++i) sum[i] += gradient[i] * value[i];
      }
      if (args.dx == nullptr) continue;
      G* const to = static_cast<G*>(args.dx) + row * args.dx_stride + column;
      float before[Width] = {};
      if (args.accumulate != 0) read(to, before);
#pragma unroll
      for (int i = 0; i < Width; ++i) gradient[i] = before[i] + factor[i] * gradient[i];
      write(to, gradient);
    }
  }
  if (args.dvalues == nullptr) return;
#pragma unroll
  for (int i = 0; i < Width; ++i) shared[threadIdx.y][threadIdx.x * Width + i] = sum[i];
  __syncthreads();
  const int thread = threadIdx.y * 32 + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32 * Width;
  for (int c = thread; c < 32 * Width; c += 32 * row_lanes) {
    if (first + c >= args.width) break;
    float total = 0;
#pragma unroll
    for (int lane = 0; lane < row_lanes; ++lane) total += shared[lane][c];
    partial[blockIdx.y * args.width + first + c] = total;
  }
}

/// partial[0][c] = Σ over the partials of live rows; 32 columns by 8 lanes of partials. No live rows: there is no sum.
__global__ void fold_kernel(float* partial, int64_t rows, const int32_t* row_count, int64_t width) {
  __shared__ float shared[row_lanes][32];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const int64_t partials = ceil_div(live_rows(rows, row_count), rows_per_partial);
  float sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int64_t p = threadIdx.y; p < partials; p += row_lanes) sum += partial[p * width + column];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  float total = 0;
#pragma unroll
  for (int lane = 0; lane < row_lanes; ++lane) total += shared[lane][threadIdx.x];
  partial[column] = total;
}

/// dvalues[k] += Σ over the columns of ring k; a block is a ring.
__global__ void ring_sum_kernel(const float* columns, const int32_t* rings, int64_t width, float* dvalues) {
  __shared__ double shared[32];
  const int32_t ring = static_cast<int32_t>(blockIdx.x);
  double sum[1] = {0};
  for (int64_t c = threadIdx.x; c < width; c += blockDim.x) {
    if ((rings == nullptr ? 0 : rings[c]) == ring) sum[0] += static_cast<double>(columns[c]);
  }
  block_sum(sum, shared);
  if (threadIdx.x == 0) dvalues[ring] += static_cast<float>(sum[0]);
}

void add_rings(mimo_stream& stream, float* partial, int64_t rows, const int32_t* row_count, const int32_t* rings,
               int64_t width, int64_t ring_count, float* dvalues) {
  launch(stream, fold_kernel, grid_of(ceil_div(width, 32)), dim3(32, row_lanes), 0, partial, rows, row_count, width);
  launch(stream, ring_sum_kernel, grid_of(ring_count), dim3(1024), 0, partial, rings, width, dvalues);
}

// ---- router logits ---------------------------------------------------------------------------------------------

__global__ void scores_forward_kernel(mimo_mask_scores_forward_args args) {
  for_each_pack(args.tokens, args.experts, [&](int64_t token, int64_t e) {
    const float m = factor_of(args.rings, args.values, e);
    const int64_t at = token * args.experts + e;
    const float logit = args.logits[at];
    float y;
    if (m <= 0.0f) {
      y = blocked_logit;
    } else if (args.sigmoid == 0) {
      y = m * logit;
    } else if (m >= 1.0f) {
      y = logit;
    } else if (logit > 0.0f) {
      y = logf(m) - logf(expf(-logit) + (1.0f - m));
    } else {
      y = logit + logf(m) - log1pf((1.0f - m) * expf(logit));
    }
    args.y[at] = y;
  });
}

__global__ void masked_bias_kernel(mimo_mask_scores_forward_args args) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= args.experts) return;
  const float m = factor_of(args.rings, args.values, e);
  const float bias = args.expert_bias[e];
  args.masked_bias[e] = m <= 0.0f ? args.blocked_bias : args.sigmoid != 0 ? m * bias : bias;
}

/// dlogits, and partial[blockIdx.y][e] = Σ over the block's tokens of dy times the slope by m.
__global__ void scores_backward_kernel(mimo_mask_scores_backward_args args, float* partial) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= args.experts) return;
  const float m = factor_of(args.rings, args.values, e);
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_partial;
  const int64_t end = smaller(begin + rows_per_partial, args.tokens);
  float sum = 0;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t at = token * args.experts + e;
    const float dy = args.dy[at], logit = args.logits[at];
    float by_logit = 0, by_value = 0;
    if (m > 0.0f && args.sigmoid == 0) {
      by_logit = m, by_value = logit;
    } else if (m >= 1.0f) {
      by_logit = 1.0f, by_value = 1.0f + expf(logit);
    } else if (m > 0.0f) {
      const float other = 1.0f / (expf(-logit) + (1.0f - m));
      by_logit = 1.0f - (1.0f - m) * other, by_value = 1.0f / m + other;
    }
    // A slope may be infinite where nothing comes back.
    if (dy != 0.0f) sum += dy * by_value;
    if (args.dlogits != nullptr) args.dlogits[at] = dy * by_logit;
  }
  partial[blockIdx.y * args.experts + e] = sum;
}

}  // namespace

void mask_columns_forward(mimo_stream& stream, const mimo_mask_columns_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "mask_columns_forward");
  if (args.rows == 0 || args.width == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const bool fits = packs_fit<T>(args.x, args.width, args.x_stride, wide) && packs_fit<T>(args.y, args.width, args.y_stride, wide);
    with_width<wide>(fits, [&](auto w) {
      const auto [grid, block] = cover(args.rows, args.width / w);
      launch(stream, forward_kernel<T, w>, grid, block, 0, args);
    });
  });
}

void mask_columns_backward(mimo_stream& stream, const mimo_mask_columns_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && args.ring_count >= 1, "mask_columns_backward");
  if (args.rows == 0 || args.width == 0) return;
  const int64_t partials = ceil_div(args.rows, rows_per_partial);
  MIMO_REQUIRE(partials <= 65535, "mask_columns_backward");
  Workspace workspace(&stream, partials * args.width * static_cast<int64_t>(sizeof(float)));
  float* const partial = workspace.as<float>();
  with_dtype(args.x_dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_dtype(args.gradient_dtype, [&](auto* g) {
      using G = std::remove_pointer_t<decltype(g)>;
      constexpr int wide = smaller(vector_width<T>, vector_width<G>);
      const bool fits = packs_fit<T>(args.x, args.width, args.x_stride, wide) &&
                        packs_fit<G>(args.dy, args.width, args.dy_stride, wide) &&
                        packs_fit<G>(args.dx, args.width, args.dx_stride, wide);
      with_width<wide>(fits, [&](auto w) {
        launch(stream, backward_kernel<G, T, w>, grid_of(ceil_div(args.width, 32 * w), partials), dim3(32, row_lanes), 0,
               args, partial);
      });
    });
  });
  if (args.dvalues == nullptr) return;
  add_rings(stream, partial, args.rows, args.row_count, args.rings, args.width, args.ring_count, args.dvalues);
}

void mask_scores_forward(mimo_stream& stream, const mimo_mask_scores_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.experts >= 1, "mask_scores_forward");
  const auto [grid, block] = cover(args.tokens, args.experts);
  if (args.tokens > 0) launch(stream, scores_forward_kernel, grid, block, 0, args);
  if (args.masked_bias == nullptr || args.expert_bias == nullptr) return;
  launch(stream, masked_bias_kernel, grid_of(ceil_div(args.experts, 128)), dim3(128), 0, args);
}

void mask_scores_backward(mimo_stream& stream, const mimo_mask_scores_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.experts >= 1 && args.ring_count >= 1, "mask_scores_backward");
  if (args.tokens == 0) return;
  const int64_t partials = ceil_div(args.tokens, rows_per_partial);
  MIMO_REQUIRE(partials <= 65535, "mask_scores_backward");
  Workspace workspace(&stream, partials * args.experts * static_cast<int64_t>(sizeof(float)));
  float* const partial = workspace.as<float>();
  launch(stream, scores_backward_kernel, grid_of(ceil_div(args.experts, 128), partials), dim3(128), 0, args, partial);
  if (args.dvalues == nullptr) return;
  add_rings(stream, partial, args.tokens, nullptr, args.rings, args.experts, args.ring_count, args.dvalues);
}

}  // namespace mimo::cuda
