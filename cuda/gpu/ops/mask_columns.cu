// Column masks of elastic models: mask factors, and columns times factors (docs/spec/elastic.md §9). The gradient of a
// factor is summed in parts that depend on sizes alone, in a fixed order.
#include "early.cuh"
#include "mask_gradients.cuh"
#include "packed.cuh"

namespace mimo::cuda {
namespace {

__global__ void factors_forward_kernel(mimo_mask_factors_forward_args args) {
  for_each_pack(args.batch, args.factor_count, [&](int64_t b, int64_t i) {
    const int32_t source = args.sources[i];
    args.factors[b * args.factor_count + i] = source < 0 ? 1.0f : args.values[b * args.value_count + source];
  });
}

/// One block for each value.
__global__ void factors_backward_kernel(mimo_mask_factors_backward_args args) {
  __shared__ double shared[32];
  const int64_t value = blockIdx.x, b = blockIdx.y;
  const float* const dfactors = args.dfactors + b * args.factor_count;
  double sum[1] = {0};
  for (int32_t m = args.starts[value] + static_cast<int32_t>(threadIdx.x); m < args.starts[value + 1];
       m += static_cast<int32_t>(blockDim.x)) {
    sum[0] += static_cast<double>(dfactors[args.members[m]]);
  }
  block_sum(sum, shared);
  if (threadIdx.x == 0) args.dvalues[b * args.value_count + value] += static_cast<float>(sum[0]);
}

// A thread keeps the factors of its columns and has several rows in flight.
constexpr int rows_at_once = 4;
constexpr int64_t rows_per_block = mask_rows_per_block;

template <int Width>
__device__ __forceinline__ void read_factors(const float* factors, const float* scale, int64_t column, bool live,
                                             float (&to)[Width]) {
  const float s = scale == nullptr ? 1.0f : *scale;
#pragma unroll
  for (int i = 0; i < Width; ++i) to[i] = live && factors != nullptr ? s * factors[column + i] : s;
}

template <class T, int Width>
__global__ void __launch_bounds__(32 * row_lanes) forward_kernel(mimo_mask_columns_forward_args args) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * Width;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_block;
  const int64_t end = smaller(begin + rows_per_block, live_rows(args.rows, args.row_count));
  if (column >= args.width) return;
  float factor[Width];
  read_factors(args.factors, args.scale, column, true, factor);
  const T* const x_data = static_cast<const T*>(args.x) + column;
  const T* const addend_data = args.addend == nullptr ? nullptr : static_cast<const T*>(args.addend) + column;
  for (int64_t first = begin + threadIdx.y; first < end; first += row_lanes * rows_at_once) {
    Packed<T, Width> x[rows_at_once], addend[rows_at_once] = {};
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int64_t row = first + j * row_lanes;
      if (row >= end) continue;
      x[j] = read_packed<Width>(x_data + row * args.x_stride);
      if (addend_data != nullptr) addend[j] = read_packed<Width>(addend_data + row * args.addend_stride);
    }
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int64_t row = first + j * row_lanes;
      if (row >= end) continue;
      float y[Width];
#pragma unroll
      for (int i = 0; i < Width; ++i) y[i] = addend[j].get(i) + factor[i] * x[j].get(i);
      write(static_cast<T*>(args.y) + row * args.y_stride + column, y);
    }
  }
}

/// dx, and partial[blockIdx.y][c] = Σ over the block's rows of dy x.
template <class G, class T, int Width>
__global__ void __launch_bounds__(32 * row_lanes) backward_kernel(mimo_mask_columns_backward_args args, float* partial) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * Width;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_block;
  const int64_t end = smaller(begin + rows_per_block, live_rows(args.rows, args.row_count));
  // Partials of rows past the live ones are not read.
  if (begin >= end) return;
  const bool live = column < args.width;
  float factor[Width], sum[Width] = {};
  read_factors(args.factors, args.scale, column, live, factor);
  for (int64_t first = begin + threadIdx.y; live && first < end; first += row_lanes * rows_at_once) {
    Packed<G, Width> dy[rows_at_once], before[rows_at_once] = {};
    Packed<T, Width> x[rows_at_once] = {};
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int64_t row = first + j * row_lanes;
      if (row >= end) continue;
      dy[j] = read_packed<Width>(static_cast<const G*>(args.dy) + row * args.dy_stride + column);
      if (partial != nullptr) x[j] = read_packed<Width>(static_cast<const T*>(args.x) + row * args.x_stride + column);
      if (args.accumulate != 0 && args.dx != nullptr) {
        before[j] = read_packed<Width>(static_cast<const G*>(args.dx) + row * args.dx_stride + column);
      }
    }
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int64_t row = first + j * row_lanes;
      if (row >= end) continue;
      float dx[Width];
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        sum[i] += dy[j].get(i) * x[j].get(i);
        dx[i] = before[j].get(i) + factor[i] * dy[j].get(i);
      }
      if (args.dx != nullptr) write(static_cast<G*>(args.dx) + row * args.dx_stride + column, dx);
    }
  }
  if (partial != nullptr) write_column_sums(sum, args.width, partial);
}

/// Threads: 32 columns x 16 lanes of partials.
__global__ void gradients_kernel(PartialSums sums, const float* factors, const float* scale, float* dfactors, float* dscale) {
  previous_is_done();
  let_next_start();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const int64_t partials =
      (live_rows(sums.rows, sums.row_count) + sums.rows_per_partial - 1) / sums.rows_per_partial;
  const float sum = sum_partials(sums.partial, partials, sums.width, column);
  if (threadIdx.y != 0 || column >= sums.width) return;
  if (dfactors != nullptr) dfactors[column] += scale == nullptr ? sum : *scale * sum;
  if (dscale != nullptr) dscale[column] += factors == nullptr ? sum : factors[column] * sum;
}

}  // namespace

void add_mask_gradients(mimo_stream& stream, const PartialSums& sums, const float* factors, const float* scale,
                        float* dfactors, float* dscale) {
  launch_early(stream, gradients_kernel, grid_of(ceil_div(sums.width, 32)), dim3(32, partial_lanes), 0, sums, factors, scale,
               dfactors, dscale);
}

void mask_factors_forward(mimo_stream& stream, const mimo_mask_factors_forward_args& args) {
  MIMO_REQUIRE(args.batch >= 0 && args.value_count >= 0 && args.factor_count >= 0, "mask_factors_forward");
  const auto [grid, block] = cover(args.batch, args.factor_count);
  if (args.batch > 0 && args.factor_count > 0) launch(stream, factors_forward_kernel, grid, block, 0, args);
}

void mask_factors_backward(mimo_stream& stream, const mimo_mask_factors_backward_args& args) {
  MIMO_REQUIRE(args.batch >= 0 && args.value_count >= 0 && args.factor_count >= 0, "mask_factors_backward");
  launch(stream, factors_backward_kernel, grid_of(args.value_count, args.batch), dim3(256), 0, args);
}

void mask_columns_forward(mimo_stream& stream, const mimo_mask_columns_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "mask_columns_forward");
  if (args.rows == 0 || args.width == 0) return;
  const int64_t blocks = ceil_div(args.rows, rows_per_block);
  MIMO_REQUIRE(blocks <= 65535, "mask_columns_forward");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* data, int64_t stride) { return packs_fit<T>(data, args.width, stride, wide); };
    const bool whole = fits(args.x, args.x_stride) && fits(args.addend, args.addend_stride) && fits(args.y, args.y_stride);
    with_width<wide>(whole, [&](auto w) {
      launch(stream, forward_kernel<T, w>, grid_of(ceil_div(args.width, 32 * w), blocks), dim3(32, row_lanes), 0, args);
    });
  });
}

void mask_columns_backward(mimo_stream& stream, const mimo_mask_columns_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "mask_columns_backward");
  if (args.rows == 0 || args.width == 0) return;
  const int64_t blocks = ceil_div(args.rows, rows_per_block);
  MIMO_REQUIRE(blocks <= 65535, "mask_columns_backward");
  const bool wanted = args.dfactors != nullptr || args.dscale != nullptr;
  Workspace workspace(&stream, wanted ? blocks * args.width * static_cast<int64_t>(sizeof(float)) : 0);
  float* const partial = wanted ? workspace.as<float>() : nullptr;
  with_dtype(args.x_dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_dtype(args.gradient_dtype, [&](auto* g) {
      using G = std::remove_pointer_t<decltype(g)>;
      constexpr int wide = smaller(vector_width<T>, vector_width<G>);
      const bool fits = packs_fit<T>(args.x, args.width, args.x_stride, wide) &&
                        packs_fit<G>(args.dy, args.width, args.dy_stride, wide) &&
                        packs_fit<G>(args.dx, args.width, args.dx_stride, wide);
      with_width<wide>(fits, [&](auto w) {
        launch(stream, backward_kernel<G, T, w>, grid_of(ceil_div(args.width, 32 * w), blocks), dim3(32, row_lanes), 0,
               args, partial);
      });
    });
  });
  if (!wanted) return;
  const PartialSums sums{partial, args.rows, rows_per_block, args.width, args.row_count};
  add_mask_gradients(stream, sums, args.factors, args.scale, args.dfactors, args.dscale);
}

}  // namespace mimo::cuda
