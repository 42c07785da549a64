// Weight gradient of the grouped GEMM with e4m3 operands: dw_g (+)= dy_gᵀ x_g. Quantised values are dequantised at
// once: factors are powers of two, so sums are the same as with factors applied afterwards.
#include <algorithm>

#include "e4m3.h"
#include "e4m3_product.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t float_bytes = static_cast<int64_t>(sizeof(float));

/// Quantises and dequantises up to 128 rows of `columns` <= 128 columns, rows `width` apart, with a factor for each
/// column or, if `square`, one for the block.
template <class T>
void round_block(const T* from, int64_t rows, int64_t columns, int64_t width, bool square, float* to) {
  float magnitude[e4m3_run] = {};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      const float x = std::fabs(load(from[row * width + i]));
      float& most = magnitude[square ? 0 : i];
      most = x > most ? x : most;
    }
  }
  float power[e4m3_run], back[e4m3_run];
  for (int64_t i = 0; i < columns; ++i) {
    const float most = magnitude[square ? 0 : i];
    power[i] = most < INFINITY ? e4m3_power(most) : NAN;
    back[i] = 1 / power[i];
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      to[row * width + i] = round_to_e4m3(load(from[row * width + i]) * power[i]) * back[i];
    }
  }
}

/// Rows as stored or, if factors is not null, in e4m3.
struct StoredRows {
  const void* values;
  const float* factors;
  int32_t dtype;
};

/// Quantises the rows of all groups; blocks are counted from the group's first row.
void round_groups(mimo_stream& stream, const StoredRows& from, const mimo_grouped_gemm_weight_gradient_args& args, int64_t width,
                  bool square, float* to) {
  if (from.factors != nullptr) {
    const E4m3Numbers numbers;
    const E4m3Rows rows{static_cast<uint8_t*>(const_cast<void*>(from.values)), const_cast<float*>(from.factors),
                        e4m3_factor_stride(args.rows)};
    parallel_range(stream.device->threads, args.offsets[args.groups], rows_per_partial, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) read_e4m3_row(numbers, rows, row, width, to + row * width);
    });
    return round_groups(stream, {to, nullptr, MIMO_DTYPE_F32}, args, width, square, to);
  }
  const int64_t across = e4m3_runs(width);
  with_dtype(from.dtype, [&](auto* t) {
    const auto* const rows = static_cast<decltype(t)>(const_cast<void*>(from.values));
    parallel_for(stream.device->threads, args.groups * across, [&](int64_t task) {
      const int64_t group = task / across, column = task % across * e4m3_run, last = args.offsets[group + 1];
      for (int64_t row = args.offsets[group]; row < last; row += e4m3_run) {
        round_block(rows + row * width + column, std::min(e4m3_run, last - row), std::min(e4m3_run, width - column), width, square,
                    to + row * width + column);
      }
    });
  });
}

/// dw[j, column .. column + columns) of a group; each 128 rows have their own partial sum.
void multiply_columns(const float* dy, const float* x, int64_t rows, const mimo_grouped_gemm_weight_gradient_args& args, int64_t j,
                      int64_t column, int64_t columns, float* dw) {
  float sums[e4m3_run] = {};
  for (int64_t first = 0; first < rows; first += e4m3_run) {
    float of_block[e4m3_run] = {};
    for (int64_t row = first; row < std::min(rows, first + e4m3_run); ++row) {
      const float left = dy[row * args.n + j];
      const float* const right = x + row * args.k + column;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) of_block[i] += left * right[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += of_block[i];
  }
  float* const to = dw + j * args.k + column;
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) to[i] = (args.accumulate != 0 ? to[i] : 0.0f) + sums[i];
}

}  // namespace

void e4m3_grouped_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  const int64_t live = args.offsets[args.groups];
  const Workspace dy(&stream, live * args.n * float_bytes), x(&stream, live * args.k * float_bytes);
  MIMO_REQUIRE((args.dy_dtype == MIMO_DTYPE_U8) == (args.dy_factors != nullptr), "grouped_gemm_weight_gradient");
  MIMO_REQUIRE((args.x_dtype == MIMO_DTYPE_U8) == (args.x_factors != nullptr), "grouped_gemm_weight_gradient");
  round_groups(stream, {args.dy, args.dy_factors, args.dy_dtype}, args, args.n, false, dy.as<float>());
  round_groups(stream, {args.x, args.x_factors, args.x_dtype}, args, args.k, true, x.as<float>());
  parallel_for(stream.device->threads, args.groups * args.n, [&](int64_t task) {
    const int64_t group = task / args.n, first = args.offsets[group], rows = args.offsets[group + 1] - first;
    if (rows == 0 && args.accumulate != 0) return;
    for (int64_t column = 0; column < args.k; column += e4m3_run) {
      multiply_columns(dy.as<float>() + first * args.n, x.as<float>() + first * args.k, rows, args, task % args.n, column,
                       std::min(e4m3_run, args.k - column), args.dw + group * args.n * args.k);
    }
  });
}

}  // namespace mimo::MIMO_ISA
