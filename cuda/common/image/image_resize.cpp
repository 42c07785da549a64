// Pillow's resizing: bicubic with antialiasing, with integer taps on 8-bit pixels and double-precision taps on 16-bit
// greys. Arithmetic: docs/spec/vision.md §5.4 (golden value G13); the order of the passes is that of Pillow 13.
#include "image_resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "image_convert.h"

namespace mimo {
namespace {

constexpr int fraction_bits = 22;

/// a b + c; in single precision rounded once, as processors do for PyTorch. Files of this folder are compiled for x86-64 alone, which
/// joins no products and sums by itself.
double multiply_add(double a, double b, double c) { return a * b + c; }
float multiply_add(float a, float b, float c) { return static_cast<float>(static_cast<double>(a) * b + c); }

/// Keys' cubic with a = -0.5.
template <class Real>
Real cubic(Real x) {
  x = std::fabs(x);
  if (x < 1) return multiply_add(multiply_add(Real(1.5), x, Real(-2.5)) * x, x, Real(1));
  if (x < 2) return multiply_add(multiply_add(multiply_add(Real(-0.5), x, Real(2.5)), x, Real(-4)), x, Real(2));
  return 0;
}

/// Filter taps of each output pixel of an axis: `count` taps from input `first` on.
template <class Weight>
struct Taps {
  struct Run {
    int first;
    int count;
  };
  std::vector<Run> runs;
  std::vector<Weight> weights;
  int longest;

  const Weight* of(int output) const { return weights.data() + static_cast<size_t>(output) * longest; }
};

/// In double precision as Pillow, in single as PyTorch, where 0.5 is a double.
template <class Real>
Taps<Real> make_taps(int from, int to) {
  const Real scale = static_cast<Real>(from) / static_cast<Real>(to);
  const Real filter_scale = scale < 1 ? 1 : scale;
  const Real support = 2 * filter_scale;
  const Real inverse = 1 / filter_scale;
  Taps<Real> taps;
  taps.longest = static_cast<int>(std::ceil(support)) * 2 + 1;
  taps.runs.resize(static_cast<size_t>(to));
  taps.weights.assign(static_cast<size_t>(to) * taps.longest, 0);
  for (int o = 0; o < to; ++o) {
    const auto centre = static_cast<Real>((o + 0.5) * scale);
    const int first = std::max(static_cast<int>(centre - support + 0.5), 0);
    const int end = std::min(static_cast<int>(centre + support + 0.5), from);
    Real* weights = taps.weights.data() + static_cast<size_t>(o) * taps.longest;
    Real sum = 0;
    for (int x = first; x < end; ++x) {
      weights[x - first] = cubic(static_cast<Real>((static_cast<Real>(x) - centre + 0.5) * inverse));
      sum += weights[x - first];
    }
    if (sum != 0) {
      for (int k = 0; k < end - first; ++k) weights[k] /= sum;
    }
    taps.runs[static_cast<size_t>(o)] = {first, end - first};
  }
  return taps;
}

/// The taps of make_taps in fixed point.
Taps<int32_t> make_integer_taps(int from, int to) {
  const auto exact = make_taps<double>(from, to);
  Taps<int32_t> taps{{}, std::vector<int32_t>(exact.weights.size()), exact.longest};
  for (const auto& run : exact.runs) taps.runs.push_back({run.first, run.count});
  std::transform(exact.weights.begin(), exact.weights.end(), taps.weights.begin(), [](double each) {
    const double weight = each * (1 << fraction_bits);
    return static_cast<int32_t>(weight < 0 ? weight - 0.5 : weight + 0.5);
  });
  return taps;
}

uint8_t clamp(int32_t value) {
  value >>= fraction_bits;
  return static_cast<uint8_t>(value < 0 ? 0 : (value > 255 ? 255 : value));
}

/// Resizes rows of `from` pixels to rows of `to` pixels.
template <int channels>
void resize_rows(const uint8_t* in, int from, uint8_t* out, int to, int64_t rows, const Taps<int32_t>& taps) {
  for (int64_t y = 0; y < rows; ++y, in += static_cast<int64_t>(from) * channels) {
    for (int o = 0; o < to; ++o) {
      const auto run = taps.runs[static_cast<size_t>(o)];
      const int32_t* weights = taps.of(o);
      const uint8_t* pixel = in + static_cast<int64_t>(run.first) * channels;
      int32_t sums[channels];
      for (int c = 0; c < channels; ++c) sums[c] = 1 << (fraction_bits - 1);
      for (int k = 0; k < run.count; ++k, pixel += channels) {
        for (int c = 0; c < channels; ++c) sums[c] += pixel[c] * weights[k];
      }
      for (int c = 0; c < channels; ++c) *out++ = clamp(sums[c]);
    }
  }
}

/// Resizes `from` rows of `stride` bytes to `to` rows.
void resize_columns(const uint8_t* in, uint8_t* out, int to, int64_t stride, const Taps<int32_t>& taps) {
  std::vector<int32_t> sums(static_cast<size_t>(stride));
  for (int o = 0; o < to; ++o, out += stride) {
    const auto run = taps.runs[static_cast<size_t>(o)];
    const int32_t* weights = taps.of(o);
    std::fill(sums.begin(), sums.end(), 1 << (fraction_bits - 1));
    for (int k = 0; k < run.count; ++k) {
      const uint8_t* row = in + (run.first + k) * stride;
      const int32_t weight = weights[k];
      for (int64_t x = 0; x < stride; ++x) sums[static_cast<size_t>(x)] += row[x] * weight;
    }
    for (int64_t x = 0; x < stride; ++x) out[x] = clamp(sums[static_cast<size_t>(x)]);
  }
}

/// The horizontal and vertical pass over 8-bit pixels of `channels` interleaved channels.
struct BytePasses {
  int channels;

  int64_t pixel_bytes() const { return channels; }
  void rows(const uint8_t* in, int from, uint8_t* out, int to, int64_t height) const {
    const auto taps = make_integer_taps(from, to);
    if (channels == 1) resize_rows<1>(in, from, out, to, height, taps);
    if (channels == 3) resize_rows<3>(in, from, out, to, height, taps);
    if (channels == 4) resize_rows<4>(in, from, out, to, height, taps);
  }
  void columns(const uint8_t* in, int from, uint8_t* out, int to, int64_t width) const {
    resize_columns(in, out, to, width * channels, make_integer_taps(from, to));
  }
};

/// The horizontal and vertical pass over 16-bit greys.
struct WordPasses {
  int64_t pixel_bytes() const { return 2; }
  void rows(const uint8_t* in, int from, uint8_t* out, int to, int64_t height) const {
    const auto taps = make_taps<double>(from, to);
    for (int64_t y = 0; y < height; ++y) {
      for (int o = 0; o < to; ++o) sum(in + 2 * y * from, 1, taps, o, out + 2 * (y * to + o));
    }
  }
  void columns(const uint8_t* in, int from, uint8_t* out, int to, int64_t width) const {
    const auto taps = make_taps<double>(from, to);
    for (int o = 0; o < to; ++o) {
      for (int64_t x = 0; x < width; ++x) sum(in + 2 * x, width, taps, o, out + 2 * (o * width + x));
    }
  }

 private:
  static void sum(const uint8_t* in, int64_t step, const Taps<double>& taps, int output, uint8_t* out) {
    const auto run = taps.runs[static_cast<size_t>(output)];
    const double* weights = taps.of(output);
    double total = 0.0;
    for (int k = 0; k < run.count; ++k) {
      uint16_t value;
      std::memcpy(&value, in + 2 * step * (run.first + k), 2);
      total += value * weights[k];
    }
    const auto rounded = static_cast<int>(total >= 0.0 ? total + 0.5 : total - 0.5);
    const auto value = static_cast<uint16_t>(std::clamp(rounded, 0, 65535));
    std::memcpy(out, &value, 2);
  }
};

/// Runs both passes in Pillow's order, because intermediate rounding is visible: vertical first if the height shrinks
/// by more than twice as much as the width.
template <class Passes>
void resize(const Passes& passes, const uint8_t* in, ResizedSize from, uint8_t* out, ResizedSize to) {
  const int shrinks_by = from.height - to.height;
  if (to.width == from.width && to.height == from.height) {
    std::memcpy(out, in, static_cast<size_t>(passes.pixel_bytes() * from.width * from.height));
  } else if (to.height == from.height) {
    passes.rows(in, from.width, out, to.width, from.height);
  } else if (to.width == from.width) {
    passes.columns(in, from.height, out, to.height, from.width);
  } else if (shrinks_by > 0 && shrinks_by > 2 * (from.width - to.width)) {
    const auto between = make_pixels(passes.pixel_bytes() * from.width * to.height);
    passes.columns(in, from.height, between.get(), to.height, from.width);
    passes.rows(between.get(), from.width, out, to.width, to.height);
  } else {
    const auto between = make_pixels(passes.pixel_bytes() * to.width * from.height);
    passes.rows(in, from.width, between.get(), to.width, from.height);
    passes.columns(between.get(), from.height, out, to.height, to.width);
  }
}

/// a * b / 255, rounded.
uint8_t multiply_255(unsigned a, unsigned b) {
  const unsigned product = a * b + 128;
  return static_cast<uint8_t>((product + (product >> 8)) >> 8);
}

/// Weights colours by alpha while resizing, so that transparent pixels do not colour their neighbours.
void resize_premultiplied(const uint8_t* in, ResizedSize from, uint8_t* out, ResizedSize to) {
  const int64_t from_bytes = int64_t{4} * from.width * from.height;
  const auto weighted = make_pixels(from_bytes);
  for (int64_t i = 0; i < from_bytes; i += 4) {
    for (int64_t c = 0; c < 3; ++c) weighted[i + c] = multiply_255(in[i + c], in[i + 3]);
    weighted[i + 3] = in[i + 3];
  }
  resize(BytePasses{4}, weighted.get(), from, out, to);
  const int64_t to_bytes = int64_t{4} * to.width * to.height;
  for (int64_t i = 0; i < to_bytes; i += 4) {
    const unsigned alpha = out[i + 3];
    if (alpha == 0 || alpha == 255) continue;
    for (int64_t c = 0; c < 3; ++c) {
      const unsigned value = 255u * out[i + c] / alpha;
      out[i + c] = static_cast<uint8_t>(value > 255 ? 255 : value);
    }
  }
}

/// Source positions by repeated addition of the scale, as in Pillow: the sum rounds differently from a product.
std::vector<int> nearest_places(int from, int to) {
  const double scale = static_cast<double>(from) / to;
  std::vector<int> places(static_cast<size_t>(to));
  double at = scale * 0.5;
  for (int& place : places) {
    place = std::min(from - 1, static_cast<int>(at));
    at += scale;
  }
  return places;
}

void resize_nearest(const uint8_t* in, ResizedSize from, uint8_t* out, ResizedSize to) {
  const std::vector<int> columns = nearest_places(from.width, to.width);
  for (const int row : nearest_places(from.height, to.height)) {
    const uint8_t* line = in + int64_t{row} * from.width;
    for (const int column : columns) *out++ = line[column];
  }
}

}  // namespace

void resize_pixels(PixelMode mode, const uint8_t* in, ResizedSize from, uint8_t* out, ResizedSize to) {
  switch (mode) {
    case PixelMode::bit:
    case PixelMode::palette: resize_nearest(in, from, out, to); return;
    case PixelMode::grey: resize(BytePasses{1}, in, from, out, to); return;
    case PixelMode::grey16: resize(WordPasses{}, in, from, out, to); return;
    case PixelMode::rgb: resize(BytePasses{3}, in, from, out, to); return;
    case PixelMode::rgba: resize_premultiplied(in, from, out, to); return;
    case PixelMode::cmyk: resize(BytePasses{4}, in, from, out, to); return;
  }
}

namespace {

/// How many of the taps' products PyTorch adds apart from their multiplication: the first, then runs of four; it fuses the rest.
int added_apart(int taps) { return 1 + (taps - 1) / 4 * 4; }

}  // namespace

void resize_rgb_unrounded(const uint8_t* in, ResizedSize from, ResizedSize to, const TakeRow& take) {
  const auto across = make_taps<float>(from.width, to.width);
  const auto down = make_taps<float>(from.height, to.height);
  const size_t values = 3 * static_cast<size_t>(to.width);
  // Of the rows resized horizontally, those that the next output row may need, each at its number modulo their count.
  const int kept = std::min(down.longest, from.height);
  std::vector<float> rows(values * static_cast<size_t>(kept));
  const auto kept_row = [&](int y) { return rows.data() + values * static_cast<size_t>(y % kept); };
  int next = 0;
  std::vector<float> sums(values);
  for (int o = 0; o < to.height; ++o) {
    const auto run = down.runs[static_cast<size_t>(o)];
    for (next = std::max(next, run.first); next < run.first + run.count; ++next) {
      const uint8_t* line = in + int64_t{3} * from.width * next;
      float* row = kept_row(next);
      for (int x = 0; x < to.width; ++x) {
        const auto columns = across.runs[static_cast<size_t>(x)];
        const float* weights = across.of(x);
        const uint8_t* pixel = line + int64_t{3} * columns.first;
        float pixel_sums[3] = {0, 0, 0};
        const int apart = added_apart(columns.count);
        for (int k = 0; k < apart; ++k, pixel += 3) {
          for (int c = 0; c < 3; ++c) pixel_sums[c] += weights[k] * static_cast<float>(pixel[c]);
        }
        for (int k = apart; k < columns.count; ++k, pixel += 3) {
          for (int c = 0; c < 3; ++c) pixel_sums[c] = multiply_add(weights[k], static_cast<float>(pixel[c]), pixel_sums[c]);
        }
        row = std::copy_n(pixel_sums, 3, row);
      }
    }
    std::fill(sums.begin(), sums.end(), 0.0f);
    const int apart = added_apart(run.count);
    for (int k = 0; k < run.count; ++k) {
      const float* row = kept_row(run.first + k);
      const float weight = down.of(o)[k];
      if (k < apart) {
        for (size_t i = 0; i < values; ++i) sums[i] += weight * row[i];
      } else {
        for (size_t i = 0; i < values; ++i) sums[i] = multiply_add(weight, row[i], sums[i]);
      }
    }
    take(o, sums.data());
  }
}

constexpr int largest_side = 65535;

}  // namespace mimo

extern "C" int32_t mimo_image_resize(const void* host_from, int32_t from_width, int32_t from_height, int32_t channels,
                                     void* host_to, int32_t to_width, int32_t to_height) {
  return mimo::guard([&] {
    using mimo::largest_side;
    MIMO_REQUIRE(channels == 1 || channels == 3 || channels == 4, "mimo_image_resize");
    MIMO_REQUIRE(from_width > 0 && from_height > 0 && to_width > 0 && to_height > 0, "mimo_image_resize");
    MIMO_REQUIRE(from_width <= largest_side && from_height <= largest_side, "mimo_image_resize");
    MIMO_REQUIRE(to_width <= largest_side && to_height <= largest_side, "mimo_image_resize");
    const auto* from = static_cast<const uint8_t*>(host_from);
    auto* to = static_cast<uint8_t*>(host_to);
    if (from_width == to_width && from_height == to_height) {
      std::memcpy(to, from, static_cast<size_t>(from_width) * from_height * channels);
      return;
    }
    mimo::resize_pixels(mimo::mode_of_channels(channels), from, {from_width, from_height}, to, {to_width, to_height});
  });
}
