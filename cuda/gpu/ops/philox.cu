// Philox random numbers as a function of (seed, element index) only, for initialisation and dropout in any layout.
#include "philox.h"

#include <cmath>

#include "kernel.cuh"

namespace mimo::cuda {
namespace {

/// A window of rows and columns of a tensor [.., full_width].
struct Window {
  int64_t rows, width, first_row, first_column, full_width;
  uint64_t seed;
};

/// Calls body(at, first, last, words) for each counter, which yields four elements: elements first .. last - 1 lie in
/// the window, element i at index at + i of the contiguous window.
template <class Body>
__device__ __forceinline__ void for_each_counter(const Window& window, Body&& body) {
  const int64_t counters = window.width / 4 + 2;  // a row may start and end inside a counter's four elements
  for_each_pack(window.rows, counters, [&](int64_t row, int64_t index) {
    const int64_t origin = (window.first_row + row) * window.full_width + window.first_column;
    const int64_t counter = origin / 4 + index;
    const int64_t first = smaller(larger(origin - counter * 4, 0), 4);
    const int64_t last = smaller(larger(origin + window.width - counter * 4, 0), 4);
    if (first >= last) return;
    const PhiloxWords words = philox(window.seed, static_cast<uint64_t>(counter));
    body(row * window.width + counter * 4 - origin, static_cast<int>(first), static_cast<int>(last), words);
  });
}

/// Two normally distributed numbers from two uniform ones (Box-Muller).
__device__ __forceinline__ float2 box_muller(float u0, float u1) {
  const float radius = sqrtf(-2.0f * logf(1.0f - u0));
  float sine, cosine;
  sincospif(2.0f * u1, &sine, &cosine);
  return make_float2(radius * cosine, radius * sine);
}

template <class T>
__global__ void philox_fill_kernel(Window window, T* y, bool normal, float offset, float factor, float highest) {
  for_each_counter(window, [&](int64_t at, int first, int last, const PhiloxWords& words) {
    float number[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) number[i] = philox_uniform(words.word[i]);
    if (normal) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 pair = box_muller(number[i], number[i + 1]);
        number[i] = pair.x, number[i + 1] = pair.y;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = offset + factor * number[i];
      if (i >= first && i < last) store(&y[at + i], value < highest ? value : highest);
    }
  });
}

template <class T>
__global__ void dropout_kernel(Window window, const T* x, T* y, float probability, float kept) {
  for_each_counter(window, [&](int64_t at, int first, int last, const PhiloxWords& words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < first || i >= last) continue;
      store(&y[at + i], load(&x[at + i]) * (philox_uniform(words.word[i]) >= probability ? kept : 0.0f));
    }
  });
}

/// Merges full-width rows into one row.
Window joined(Window window) {
  if (window.width == window.full_width) {
    window.first_column = window.first_row * window.full_width;
    window.first_row = 0;
    window.width *= window.rows;
    window.rows = window.rows > 0 ? 1 : 0;
  }
  return window;
}

}  // namespace

void philox_fill(mimo_stream& stream, const mimo_philox_fill_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && args.first_row >= 0 && args.first_column >= 0, "philox_fill");
  MIMO_REQUIRE(args.first_column + args.width <= args.full_width, "philox_fill");
  MIMO_REQUIRE(args.distribution == MIMO_DISTRIBUTION_UNIFORM || args.distribution == MIMO_DISTRIBUTION_NORMAL,
               "philox_fill");
  if (args.rows == 0 || args.width == 0) return;
  const bool normal = args.distribution == MIMO_DISTRIBUTION_NORMAL;
  const float offset = static_cast<float>(args.a);
  const float factor = static_cast<float>(normal ? args.b : args.b - args.a);
  const float highest = normal ? INFINITY : std::nextafterf(static_cast<float>(args.b), offset);
  const Window window = joined({args.rows, args.width, args.first_row, args.first_column, args.full_width,
                                static_cast<uint64_t>(args.seed)});
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const auto [grid, block] = cover(window.rows, window.width / 4 + 2);
    launch(stream, philox_fill_kernel<T>, grid, block, 0, window, static_cast<T*>(args.y), normal, offset, factor,
           highest);
  });
}

void dropout(mimo_stream& stream, const mimo_dropout_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && args.first_row >= 0 && args.first_column >= 0, "dropout");
  MIMO_REQUIRE(args.first_column + args.width <= args.full_width, "dropout");
  MIMO_REQUIRE(args.probability >= 0 && args.probability < 1, "dropout");
  if (args.rows == 0 || args.width == 0) return;
  const float kept = 1.0f / (1.0f - args.probability);
  const Window window = joined({args.rows, args.width, args.first_row, args.first_column, args.full_width,
                                static_cast<uint64_t>(args.seed)});
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const auto [grid, block] = cover(window.rows, window.width / 4 + 2);
    launch(stream, dropout_kernel<T>, grid, block, 0, window, static_cast<const T*>(args.x), static_cast<T*>(args.y),
           args.probability, kept);
  });
}

}  // namespace mimo::cuda
