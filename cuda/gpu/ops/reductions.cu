// Sums over whole buffers and over rows. Partial sums depend on sizes alone and are added in order.
#include "checksum.h"
#include "column_sums.cuh"
#include "norm.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256;
constexpr int64_t elements_per_partial = 65536;

// ---- whole buffers ---------------------------------------------------------------------------------------------

struct Identity {
  __device__ static double of(float x) { return static_cast<double>(x); }
};
struct Square {
  __device__ static double of(float x) { return static_cast<double>(x) * static_cast<double>(x); }
};
struct IsZero {
  __device__ static double of(float x) { return x == 0.0f ? 1.0 : 0.0; }
};

/// partial[block] = Σ Value(x[i]) (times y[i] if given) over the block's range.
template <class Value, class T, int Width>
__global__ void partial_sums_kernel(const T* x, const float* y, int64_t elements, double* partial) {
  __shared__ double shared[32];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * elements_per_partial;
  const int64_t end = smaller(begin + elements_per_partial, elements);
  double sum[1] = {0};
  for (int64_t at = begin + threadIdx.x * Width; at < end; at += blockDim.x * Width) {
    float value[Width];
    read(x + at, value);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      double term = Value::of(value[i]);
      if (y != nullptr) term *= static_cast<double>(y[at + i]);
      sum[0] += term;
    }
  }
  block_sum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum[0];
}

/// total[0] += Σ partial; with null partial, total[0] += constant.
__global__ void add_total_kernel(const double* partial, int64_t partials, double constant, double* total) {
  __shared__ double shared[32];
  double sum[1] = {0};
  for (int64_t i = threadIdx.x; i < partials; i += blockDim.x) sum[0] += partial[i];
  block_sum(sum, shared);
  if (threadIdx.x == 0) total[0] += sum[0] + constant;
}

template <class Value, class T>
void add_sum(mimo_stream& stream, const T* x, const float* y, int64_t elements, double* total) {
  if (elements == 0) return;
  const int64_t partials = ceil_div(elements, elements_per_partial);
  Workspace workspace(&stream, partials * static_cast<int64_t>(sizeof(double)));
  constexpr int wide = vector_width<T>;
  with_width<wide>(packs_fit<T>(x, elements, 0, wide), [&](auto w) {
    launch(stream, partial_sums_kernel<Value, T, w>, grid_of(partials), dim3(threads), 0, x, y, elements,
           workspace.as<double>());
  });
  launch(stream, add_total_kernel, dim3(1), dim3(threads), 0, workspace.as<double>(), partials, 0.0, total);
}

/// sum[0] += Σ mixed(i, x[i]) over the block's range. Integer atomics: the order does not matter.
__global__ void checksum_kernel(const uint32_t* x, int64_t elements, unsigned long long* sum) {
  __shared__ unsigned long long shared[32];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * elements_per_partial;
  const int64_t end = smaller(begin + elements_per_partial, elements);
  unsigned long long own[1] = {0};
  for (int64_t at = begin + threadIdx.x; at < end; at += blockDim.x) own[0] += mixed(at, x[at]);
  block_sum(own, shared);
  if (threadIdx.x == 0) atomicAdd(sum, own[0]);
}

template <class T, int Width>
__global__ void find_nonfinite_kernel(const T* x, int64_t packs, int32_t* flag) {
  for_each_pack(1, packs, [&](int64_t, int64_t pack) {
    float value[Width];
    read(x + pack * Width, value);
    bool found = false;
#pragma unroll
    for (int i = 0; i < Width; ++i) found |= !isfinite(value[i]);
    if (found) *flag = 1;
  });
}

// ---- rows ------------------------------------------------------------------------------------------------------

constexpr int64_t rows_per_partial = 128;

/// partial[blockIdx.y][c] = Σ over the block's rows of dy[r][c]. Threads: 32 packs of columns x 8 rows.
template <class T, int Width>
__global__ void column_sum_kernel(const T* dy, const int32_t* row_count, int64_t rows, int64_t width, int64_t stride,
                                  float* partial) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * Width;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_partial;
  const int64_t end = smaller(begin + rows_per_partial, live_rows(rows, row_count));
  float sum[Width] = {};
  if (column < width) {
    for (int64_t row = begin + threadIdx.y; row < end; row += row_lanes) {
      float value[Width];
      read(dy + row * stride + column, value);
#pragma unroll
      for (int i = 0; i < Width; ++i) sum[i] += value[i];
    }
  }
  write_column_sums(sum, width, partial);
}

/// total[c] += Σ_p partial[p][c] for the block's 32 columns.
__device__ __forceinline__ void add_own_columns(const float* partial, int64_t partials, int64_t width, float* total) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const float sum = sum_partials(partial, partials, width, column);
  if (threadIdx.y != 0 || column >= width) return;
  total[column] += sum;
}

__global__ void add_partials_kernel(const float* partial, int64_t partials, int64_t width, float* total) {
  previous_is_done();
  let_next_start();
  add_own_columns(partial, partials, width, total);
}
__global__ void add_partials_of_two_kernel(const float* first_partial, float* first, const float* second_partial,
                                           float* second, int64_t partials, int64_t width) {
  previous_is_done();
  let_next_start();
  float* const total = blockIdx.y == 0 ? first : second;
  if (total != nullptr) add_own_columns(blockIdx.y == 0 ? first_partial : second_partial, partials, width, total);
}

}  // namespace

void add_partials(mimo_stream& stream, const float* partial, int64_t partials, int64_t width, float* total) {
  launch_early(stream, add_partials_kernel, grid_of(ceil_div(width, 32)), dim3(32, partial_lanes), 0, partial, partials,
         width, total);
}

void add_partials_of_two(mimo_stream& stream, const float* first_partial, float* first, const float* second_partial,
                         float* second, int64_t partials, int64_t width) {
  launch_early(stream, add_partials_of_two_kernel, grid_of(ceil_div(width, 32), 2), dim3(32, partial_lanes), 0, first_partial,
         first, second_partial, second, partials, width);
}

void column_sum(mimo_stream& stream, const mimo_column_sum_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "column_sum");
  if (args.rows == 0 || args.width == 0) return;
  const int64_t partials = ceil_div(args.rows, rows_per_partial);
  MIMO_REQUIRE(partials <= 65535, "column_sum");
  Workspace workspace(&stream, partials * args.width * static_cast<int64_t>(sizeof(float)));
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    with_width<wide>(packs_fit<T>(args.dy, args.width, args.stride, wide), [&](auto w) {
      launch(stream, column_sum_kernel<T, w>, grid_of(ceil_div(args.width, 32 * w), partials), dim3(32, row_lanes), 0,
             static_cast<const T*>(args.dy), args.row_count, args.rows, args.width, args.stride,
             workspace.as<float>());
    });
  });
  add_partials(stream, workspace.as<float>(), partials, args.width, args.dbias);
}

void masked_sum(mimo_stream& stream, const mimo_masked_sum_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "masked_sum");
  add_sum<Identity>(stream, args.x, args.mask, args.elements, args.sum);
  if (args.count == nullptr) return;
  if (args.mask != nullptr) {
    add_sum<Identity>(stream, args.mask, nullptr, args.elements, args.count);
  } else {
    launch(stream, add_total_kernel, dim3(1), dim3(32), 0, nullptr, 0, static_cast<double>(args.elements), args.count);
  }
}

void sum_of_squares(mimo_stream& stream, const mimo_sum_of_squares_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "sum_of_squares");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    add_sum<Square>(stream, static_cast<const T*>(args.x), nullptr, args.elements, args.sum);
  });
}

void count_zeros(mimo_stream& stream, const mimo_count_zeros_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "count_zeros");
  add_sum<IsZero>(stream, args.x, nullptr, args.elements, args.count);
}

void checksum(mimo_stream& stream, const mimo_checksum_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "checksum");
  if (args.elements == 0) return;
  launch(stream, checksum_kernel, grid_of(ceil_div(args.elements, elements_per_partial)), dim3(threads), 0, args.x,
         args.elements, reinterpret_cast<unsigned long long*>(args.sum));
}

void find_nonfinite(mimo_stream& stream, const mimo_find_nonfinite_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "find_nonfinite");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    with_width<wide>(packs_fit<T>(args.x, args.elements, 0, wide), [&](auto w) {
      const auto [grid, block] = cover(1, args.elements / w);
      launch(stream, find_nonfinite_kernel<T, w>, grid, block, 0, static_cast<const T*>(args.x), args.elements / w,
             args.flag);
    });
  });
}

}  // namespace mimo::cuda
