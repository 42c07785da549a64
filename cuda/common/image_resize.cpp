// Resizing as the Pillow library does it (bicubic with antialiasing on 8-bit pixels, integer taps), and normalisation
// into planes or patch vectors. Sources of the arithmetic: vision.md §5.4 (golden values G13, G14), §2.1.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "status.h"

namespace mimo {
namespace {

constexpr int fraction_bits = 22;

/// Keys' cubic with a = -0.5.
double cubic(double x) {
  x = std::fabs(x);
  if (x < 1.0) return ((1.5 * x) - 2.5) * x * x + 1.0;
  if (x < 2.0) return ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0;
  return 0.0;
}

/// Taps of every output of an axis: `count` of them from input `first` on.
struct Taps {
  struct Run {
    int first;
    int count;
  };
  std::vector<Run> runs;
  std::vector<int32_t> weights;
  int longest;
};

Taps make_taps(int from, int to) {
  const double scale = static_cast<double>(from) / to;
  const double filter_scale = scale < 1.0 ? 1.0 : scale;
  const double support = 2.0 * filter_scale;
  Taps taps;
  taps.longest = static_cast<int>(std::ceil(support)) * 2 + 1;
  taps.runs.resize(static_cast<size_t>(to));
  taps.weights.assign(static_cast<size_t>(to) * taps.longest, 0);
  std::vector<double> exact(static_cast<size_t>(taps.longest));
  for (int o = 0; o < to; ++o) {
    const double centre = (o + 0.5) * scale;
    int first = static_cast<int>(centre - support + 0.5);
    if (first < 0) first = 0;
    int end = static_cast<int>(centre + support + 0.5);
    if (end > from) end = from;
    double sum = 0.0;
    for (int x = first; x < end; ++x) {
      const double weight = cubic((x - centre + 0.5) * (1.0 / filter_scale));
      exact[static_cast<size_t>(x - first)] = weight;
      sum += weight;
    }
    int32_t* weights = taps.weights.data() + static_cast<size_t>(o) * taps.longest;
    for (int k = 0; k < end - first; ++k) {
      const double weight = (sum != 0.0 ? exact[static_cast<size_t>(k)] / sum : exact[static_cast<size_t>(k)]) *
                            (1 << fraction_bits);
      weights[k] = static_cast<int32_t>(weight < 0 ? weight - 0.5 : weight + 0.5);
    }
    taps.runs[static_cast<size_t>(o)] = {first, end - first};
  }
  return taps;
}

uint8_t clamp(int32_t value) {
  value >>= fraction_bits;
  return static_cast<uint8_t>(value < 0 ? 0 : (value > 255 ? 255 : value));
}

/// Rows of `from` pixels become rows of `to` pixels.
template <int channels>
void resize_rows(const uint8_t* in, int from, uint8_t* out, int to, int64_t rows, const Taps& taps) {
  for (int64_t y = 0; y < rows; ++y, in += static_cast<int64_t>(from) * channels) {
    for (int o = 0; o < to; ++o) {
      const Taps::Run run = taps.runs[static_cast<size_t>(o)];
      const int32_t* weights = taps.weights.data() + static_cast<size_t>(o) * taps.longest;
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

/// `from` rows of `stride` bytes become `to` rows.
void resize_columns(const uint8_t* in, uint8_t* out, int to, int64_t stride, const Taps& taps) {
  std::vector<int32_t> sums(static_cast<size_t>(stride));
  for (int o = 0; o < to; ++o, out += stride) {
    const Taps::Run run = taps.runs[static_cast<size_t>(o)];
    const int32_t* weights = taps.weights.data() + static_cast<size_t>(o) * taps.longest;
    std::fill(sums.begin(), sums.end(), 1 << (fraction_bits - 1));
    for (int k = 0; k < run.count; ++k) {
      const uint8_t* row = in + (run.first + k) * stride;
      const int32_t weight = weights[k];
      for (int64_t x = 0; x < stride; ++x) sums[static_cast<size_t>(x)] += row[x] * weight;
    }
    for (int64_t x = 0; x < stride; ++x) out[x] = clamp(sums[static_cast<size_t>(x)]);
  }
}

void resize(const uint8_t* in, int from_width, int from_height, int channels, uint8_t* out, int to_width,
            int to_height) {
  const int64_t from_stride = static_cast<int64_t>(from_width) * channels;
  const int64_t stride = static_cast<int64_t>(to_width) * channels;
  std::vector<uint8_t> narrowed;
  const uint8_t* rows = in;
  if (to_width != from_width) {
    const Taps taps = make_taps(from_width, to_width);
    narrowed.resize(static_cast<size_t>(stride * from_height));
    if (channels == 1) resize_rows<1>(in, from_width, narrowed.data(), to_width, from_height, taps);
    if (channels == 3) resize_rows<3>(in, from_width, narrowed.data(), to_width, from_height, taps);
    if (channels == 4) resize_rows<4>(in, from_width, narrowed.data(), to_width, from_height, taps);
    rows = narrowed.data();
  }
  if (to_height != from_height) {
    resize_columns(rows, out, to_height, stride, make_taps(from_height, to_height));
  } else {
    std::memcpy(out, rows, static_cast<size_t>((rows == in ? from_stride : stride) * from_height));
  }
}

/// a * b / 255, rounded.
uint8_t multiply_255(unsigned a, unsigned b) {
  const unsigned product = a * b + 128;
  return static_cast<uint8_t>((product + (product >> 8)) >> 8);
}

/// Transparent pixels must not colour their neighbours: colours are weighted by alpha while resizing.
void resize_premultiplied(const uint8_t* in, int from_width, int from_height, uint8_t* out, int to_width,
                          int to_height) {
  std::vector<uint8_t> weighted(static_cast<size_t>(from_width) * from_height * 4);
  for (size_t i = 0; i < weighted.size(); i += 4) {
    for (size_t c = 0; c < 3; ++c) weighted[i + c] = multiply_255(in[i + c], in[i + 3]);
    weighted[i + 3] = in[i + 3];
  }
  resize(weighted.data(), from_width, from_height, 4, out, to_width, to_height);
  const size_t bytes = static_cast<size_t>(to_width) * to_height * 4;
  for (size_t i = 0; i < bytes; i += 4) {
    const unsigned alpha = out[i + 3];
    if (alpha == 0 || alpha == 255) continue;
    for (size_t c = 0; c < 3; ++c) {
      const unsigned value = 255u * out[i + c] / alpha;
      out[i + c] = static_cast<uint8_t>(value > 255 ? 255 : value);
    }
  }
}

/// Values of a byte in every channel: v / 255, minus the mean, over the deviation, each rounded to fp32.
void make_table(const float* statistics, float (&table)[3][256]) {
  for (int c = 0; c < 3; ++c) {
    for (int v = 0; v < 256; ++v) {
      const float unit = static_cast<float>(v) / 255.0f;
      const float centred = unit - statistics[c];
      table[c][v] = centred / statistics[3 + c];
    }
  }
}

void normalize(const uint8_t* pixels, int width, int height, int patch, const float* statistics, float* out) {
  float table[3][256];
  make_table(statistics, table);
  const int64_t row = static_cast<int64_t>(width) * 3;
  if (patch == 0) {
    for (int c = 0; c < 3; ++c) {
      const uint8_t* from = pixels + c;
      for (int64_t i = 0; i < static_cast<int64_t>(width) * height; ++i, from += 3) *out++ = table[c][*from];
    }
    return;
  }
  for (int top = 0; top < height; top += patch) {
    for (int left = 0; left < width; left += patch) {
      for (int c = 0; c < 3; ++c) {
        for (int y = 0; y < patch; ++y) {
          const uint8_t* from = pixels + (top + y) * row + static_cast<int64_t>(left) * 3 + c;
          for (int x = 0; x < patch; ++x, from += 3) *out++ = table[c][*from];
        }
      }
    }
  }
}

constexpr int largest_side = 65535;

}  // namespace
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
    const bool same = from_width == to_width && from_height == to_height;
    if (channels == 4 && !same) {
      mimo::resize_premultiplied(from, from_width, from_height, to, to_width, to_height);
    } else {
      mimo::resize(from, from_width, from_height, channels, to, to_width, to_height);
    }
  });
}

extern "C" int32_t mimo_image_normalize(const void* host_pixels, int32_t width, int32_t height, int32_t patch,
                                        const float* host_statistics, float* host_values) {
  return mimo::guard([&] {
    MIMO_REQUIRE(width > 0 && height > 0 && patch >= 0, "mimo_image_normalize");
    MIMO_REQUIRE(patch == 0 || (width % patch == 0 && height % patch == 0), "mimo_image_normalize");
    mimo::normalize(static_cast<const uint8_t*>(host_pixels), width, height, patch, host_statistics, host_values);
  });
}
