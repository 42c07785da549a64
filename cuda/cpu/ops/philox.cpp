// Philox random numbers as a function of (seed, element index) only, for initialisation and dropout in any layout.
#include "philox.h"

#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t counters_per_block = 64;
constexpr int64_t elements_per_block = 4 * counters_per_block;
constexpr int64_t blocks_per_run = 32;

/// Natural logarithm of a normal x > 0, to 1 ulp (Cephes' polynomial), vectorisable.
inline float log_fast(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  // x = m 2^e with m in [sqrt(1/2), sqrt 2).
  const uint32_t shifted = bits - 0x3F3504F3u;
  const float e = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const uint32_t mantissa = (shifted & 0x007FFFFFu) + 0x3F3504F3u;
  float m;
  std::memcpy(&m, &mantissa, sizeof(m));
  const float f = m - 1.0f, f2 = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  p = p * f * f2 - 2.12194440e-4f * e - 0.5f * f2;
  return f + p + 0.693359375f * e;
}

struct Pair {
  float even, odd;
};

/// Two normally distributed numbers from two uniform ones (Box-Muller). The angle is reduced in turns, where that is
/// exact.
inline Pair box_muller(float u0, float u1) {
  const float radius = std::sqrt(-2.0f * log_fast(1.0f - u0));
  const int32_t quarter = static_cast<int32_t>(u1 * 4.0f + 0.5f);
  const float t = (u1 - static_cast<float>(quarter) * 0.25f) * 6.28318530718f;
  const float t2 = t * t;
  const float sine = t + t * t2 * ((-1.9515295891e-4f * t2 + 8.3321608736e-3f) * t2 - 1.6666654611e-1f);
  const float cosine =
      1.0f - 0.5f * t2 + t2 * t2 * ((2.443315711809948e-5f * t2 - 1.388731625493765e-3f) * t2 + 4.166664568298827e-2f);
  const bool swapped = (quarter & 1) != 0;
  const float s = swapped ? cosine : sine, c = swapped ? sine : cosine;
  const bool cosine_negative = ((quarter + 1) & 2) != 0, sine_negative = (quarter & 2) != 0;
  return {radius * (cosine_negative ? -c : c), radius * (sine_negative ? -s : s)};
}

/// Generates elements 4 counter .. 4 counter + 255, uniform or standard normal.
void generate(uint64_t seed, uint64_t counter, bool normal, float* to) {
  float word[4][counters_per_block];
#pragma omp simd
  for (int64_t i = 0; i < counters_per_block; ++i) {
    const PhiloxWords words = philox(seed, counter + static_cast<uint64_t>(i));
    word[0][i] = philox_uniform(words.word[0]);
    word[1][i] = philox_uniform(words.word[1]);
    word[2][i] = philox_uniform(words.word[2]);
    word[3][i] = philox_uniform(words.word[3]);
  }
  if (normal) {
    for (int w = 0; w < 4; w += 2) {
#pragma omp simd
      for (int64_t i = 0; i < counters_per_block; ++i) {
        const Pair pair = box_muller(word[w][i], word[w + 1][i]);
        word[w][i] = pair.even;
        word[w + 1][i] = pair.odd;
      }
    }
  }
  for (int64_t i = 0; i < counters_per_block; ++i)
    for (int w = 0; w < 4; ++w) to[4 * i + w] = word[w][i];
}

/// A window of rows and columns of a tensor [.., full_width].
struct Window {
  int64_t rows, width, first_row, first_column, full_width, seed;
};

/// Calls body(i, numbers, count) with elements i .. i + count - 1 of the window, contiguous in one row.
template <class Body>
void for_each_run(mimo_stream& stream, Window window, bool normal, Body&& body) {
  if (window.rows == 0 || window.width == 0) return;
  if (window.width == window.full_width) {  // full-width rows are merged into one
    window.first_column = window.first_row * window.full_width;
    window.first_row = 0;
    window.width *= window.rows;
    window.rows = 1;
  }
  const int64_t run = blocks_per_run * elements_per_block;
  const int64_t runs_per_row = (window.width + run - 1) / run;
  parallel_for(stream.device->threads, window.rows * runs_per_row, [&](int64_t task) {
    const int64_t row = task / runs_per_row, begin = task % runs_per_row * run;
    const int64_t end = begin + run < window.width ? begin + run : window.width;
    const int64_t origin = (window.first_row + row) * window.full_width + window.first_column;
    float numbers[elements_per_block];
    for (int64_t column = begin; column < end;) {
      const int64_t element = origin + column, skip = element % 4;
      generate(static_cast<uint64_t>(window.seed), static_cast<uint64_t>(element / 4), normal, numbers);
      const int64_t count = elements_per_block - skip < end - column ? elements_per_block - skip : end - column;
      body(row * window.width + column, numbers + skip, count);
      column += count;
    }
  });
}

template <class T>
void place(const float* numbers, int64_t count, float offset, float factor, float highest, T* y) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = offset + factor * numbers[i];
    store(&y[i], value < highest ? value : highest);
  }
}

template <class T>
void drop(const float* numbers, int64_t count, float probability, float kept, const T* x, T* y) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(&y[i], load(x[i]) * (numbers[i] >= probability ? kept : 0.0f));
}

}  // namespace

void philox_fill(mimo_stream& stream, const mimo_philox_fill_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && args.first_row >= 0 && args.first_column >= 0, "philox_fill");
  MIMO_REQUIRE(args.first_column + args.width <= args.full_width, "philox_fill");
  MIMO_REQUIRE(args.distribution == MIMO_DISTRIBUTION_UNIFORM || args.distribution == MIMO_DISTRIBUTION_NORMAL,
               "philox_fill");
  const bool normal = args.distribution == MIMO_DISTRIBUTION_NORMAL;
  const float offset = static_cast<float>(args.a);
  const float factor = static_cast<float>(normal ? args.b : args.b - args.a);
  const float highest = normal ? INFINITY : std::nextafterf(static_cast<float>(args.b), offset);
  const Window window{args.rows, args.width, args.first_row, args.first_column, args.full_width, args.seed};
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    T* y = static_cast<T*>(args.y);
    for_each_run(stream, window, normal, [&](int64_t at, const float* numbers, int64_t count) {
      place(numbers, count, offset, factor, highest, y + at);
    });
  });
}

void dropout(mimo_stream& stream, const mimo_dropout_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 0 && args.first_row >= 0 && args.first_column >= 0, "dropout");
  MIMO_REQUIRE(args.first_column + args.width <= args.full_width, "dropout");
  MIMO_REQUIRE(args.probability >= 0 && args.probability < 1, "dropout");
  const float kept = 1.0f / (1.0f - args.probability);
  const Window window{args.rows, args.width, args.first_row, args.first_column, args.full_width, args.seed};
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* x = static_cast<const T*>(args.x);
    T* y = static_cast<T*>(args.y);
    for_each_run(stream, window, false, [&](int64_t at, const float* numbers, int64_t count) {
      drop(numbers, count, args.probability, kept, x + at, y + at);
    });
  });
}

}  // namespace mimo::MIMO_ISA
