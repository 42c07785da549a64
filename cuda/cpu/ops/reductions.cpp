// Sums over whole buffers and over rows. Partial sums depend on sizes alone and are added in order, so a result does
// not depend on the number of threads.
#include <atomic>

#include "checksum.h"
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t elements_per_partial = 32768;

/// Σ of part(begin, end) over runs of [0, elements).
template <class Part>
double sum_of_parts(mimo_stream& stream, int64_t elements, Part&& part) {
  const int64_t partials = (elements + elements_per_partial - 1) / elements_per_partial;
  Workspace workspace(&stream, partials * static_cast<int64_t>(sizeof(double)));
  double* partial = workspace.as<double>();
  parallel_range(stream.device->threads, elements, elements_per_partial,
                 [&](int64_t begin, int64_t end) { partial[begin / elements_per_partial] = part(begin, end); });
  double sum = 0;
  for (int64_t i = 0; i < partials; ++i) sum += partial[i];
  return sum;
}

// Partial sums as plain functions: in a lambda the loop reloads captures and does not vectorise.

double part_sum(const float* x, int64_t begin, int64_t end) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(x[i]);
  return sum;
}

double part_dot(const float* x, const float* y, int64_t begin, int64_t end) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  return sum;
}

template <class T>
double part_squares(const T* x, int64_t begin, int64_t end) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = begin; i < end; ++i) {
    const double value = static_cast<double>(load(x[i]));
    sum += value * value;
  }
  return sum;
}

double part_zeros(const float* x, int64_t begin, int64_t end) {
  int32_t count = 0;
#pragma omp simd reduction(+ : count)
  for (int64_t i = begin; i < end; ++i) count += x[i] == 0.0f ? 1 : 0;
  return static_cast<double>(count);
}

uint64_t part_checksum(const uint32_t* x, int64_t begin, int64_t end) {
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = begin; i < end; ++i) sum += mixed(i, x[i]);
  return sum;
}

bool is_nonfinite(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7F800000u) == 0x7F800000u;
}

template <class T>
double part_nonfinite(const T* x, int64_t begin, int64_t end) {
  int32_t found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t i = begin; i < end; ++i) found |= is_nonfinite(load(x[i])) ? 1 : 0;
  return static_cast<double>(found);
}

/// sum[c] = Σ over `rows` rows of dy[r][c]; four rows at a time, for fewer cache accesses to the sums.
template <class T>
void sum_rows(const T* dy, int64_t rows, int64_t width, int64_t stride, float* sum) {
  std::memset(sum, 0, static_cast<size_t>(width) * sizeof(float));
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T* row = dy + r * stride;
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      sum[c] += (load(row[c]) + load(row[stride + c])) + (load(row[2 * stride + c]) + load(row[3 * stride + c]));
    }
  }
  for (; r < rows; ++r) {
    const T* row = dy + r * stride;
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) sum[c] += load(row[c]);
  }
}

}  // namespace

void column_sum(mimo_stream& stream, const mimo_column_sum_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0, "column_sum");
  const int64_t rows = live_rows(args.rows, args.row_count);
  const int64_t partials = (rows + rows_per_partial - 1) / rows_per_partial;
  Workspace workspace(&stream, partials * args.width * static_cast<int64_t>(sizeof(float)));
  float* partial = workspace.as<float>();
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* dy = static_cast<const T*>(args.dy);
    parallel_range(stream.device->threads, rows, rows_per_partial, [&](int64_t begin, int64_t end) {
      sum_rows(dy + begin * args.stride, end - begin, args.width, args.stride,
               partial + begin / rows_per_partial * args.width);
    });
  });
  add_partials(stream, partial, partials, args.width, args.dbias);
}

void masked_sum(mimo_stream& stream, const mimo_masked_sum_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "masked_sum");
  args.sum[0] += sum_of_parts(stream, args.elements, [&](int64_t begin, int64_t end) {
    return args.mask ? part_dot(args.x, args.mask, begin, end) : part_sum(args.x, begin, end);
  });
  if (args.count == nullptr) return;
  args.count[0] += args.mask == nullptr ? static_cast<double>(args.elements)
                                        : sum_of_parts(stream, args.elements, [&](int64_t begin, int64_t end) {
                                            return part_sum(args.mask, begin, end);
                                          });
}

void sum_of_squares(mimo_stream& stream, const mimo_sum_of_squares_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "sum_of_squares");
  with_dtype(args.dtype, [&](auto* t) {
    const auto* x = static_cast<const std::remove_pointer_t<decltype(t)>*>(args.x);
    args.sum[0] += sum_of_parts(stream, args.elements,
                                [&](int64_t begin, int64_t end) { return part_squares(x, begin, end); });
  });
}

void count_zeros(mimo_stream& stream, const mimo_count_zeros_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "count_zeros");
  args.count[0] += sum_of_parts(stream, args.elements,
                                [&](int64_t begin, int64_t end) { return part_zeros(args.x, begin, end); });
}

void checksum(mimo_stream& stream, const mimo_checksum_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "checksum");
  // Sums of integers do not depend on their order.
  std::atomic<uint64_t> sum{0};
  parallel_range(stream.device->threads, args.elements, elements_per_partial,
                 [&](int64_t begin, int64_t end) { sum += part_checksum(args.x, begin, end); });
  args.sum[0] += sum;
}

void find_nonfinite(mimo_stream& stream, const mimo_find_nonfinite_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "find_nonfinite");
  with_dtype(args.dtype, [&](auto* t) {
    const auto* x = static_cast<const std::remove_pointer_t<decltype(t)>*>(args.x);
    const double runs_with_one = sum_of_parts(
        stream, args.elements, [&](int64_t begin, int64_t end) { return part_nonfinite(x, begin, end); });
    if (runs_with_one > 0) args.flag[0] = 1;
  });
}

}  // namespace mimo::MIMO_ISA
