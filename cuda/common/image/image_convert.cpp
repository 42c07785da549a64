#include "image_convert.h"

#include <algorithm>
#include <cstring>

namespace mimo {
namespace {

/// a * b / 255, rounded.
uint8_t multiply_255(unsigned a, unsigned b) {
  const unsigned product = a * b + 128;
  return static_cast<uint8_t>((product + (product >> 8)) >> 8);
}

using Rgba = std::array<uint8_t, 4>;

Rgba grey(uint8_t value) { return {value, value, value, 255}; }

/// ITU-R 601 luma in 16-bit fixed point.
uint8_t luma(const Rgba& pixel) {
  return static_cast<uint8_t>((pixel[0] * 19595u + pixel[1] * 38470u + pixel[2] * 7471u + 0x8000u) >> 16);
}

Rgba from_inks(const uint8_t* inks) {
  const unsigned light = 255u - inks[3];
  Rgba pixel{0, 0, 0, 255};
  for (size_t c = 0; c < 3; ++c) {
    const unsigned absorbed = multiply_255(inks[c], light);
    pixel[c] = static_cast<uint8_t>(light > absorbed ? light - absorbed : 0);
  }
  return pixel;
}

/// Pillow clips 16-bit greys at 255.
uint8_t cut_off(const uint8_t* at) {
  uint16_t value;
  std::memcpy(&value, at, 2);
  return static_cast<uint8_t>(std::min<uint16_t>(value, 255));
}

/// Writes the pixel that `at` returns for each source address.
template <int step, class At>
void convert(const ImageHeader& header, const uint8_t* pixels, int64_t area, int channels, uint8_t* out, At at) {
  const bool transparent = channels == 4 && header.has_transparent_colour;
  const auto& colour = header.transparent_colour;
  for (int64_t i = 0; i < area; ++i, pixels += step) {
    Rgba pixel = at(pixels);
    if (transparent && std::equal(colour.begin(), colour.end(), pixel.begin())) pixel[3] = 0;
    if (channels == 1) {
      *out++ = luma(pixel);
    } else {
      out = std::copy_n(pixel.begin(), channels, out);
    }
  }
}

/// A channel on white in Pillow's alpha_composite: rounded with seven further bits.
uint8_t on_white(unsigned value, unsigned alpha) {
  constexpr unsigned bits = 7;
  const unsigned sum = ((value * alpha + 255 * (255 - alpha)) << bits) + (0x80u << bits);
  return static_cast<uint8_t>((((sum >> 8) + sum) >> 8) >> bits);
}

}  // namespace

PixelMode mode_of_channels(int channels) {
  return channels == 1 ? PixelMode::grey : channels == 3 ? PixelMode::rgb : PixelMode::rgba;
}

void convert_pixels(const ImageHeader& header, const uint8_t* pixels, int64_t area, int channels, uint8_t* out) {
  const auto each = [&]<int step>(auto at) { convert<step>(header, pixels, area, channels, out, at); };
  switch (header.mode) {
    case PixelMode::bit:
    case PixelMode::grey:
      each.template operator()<1>([](const uint8_t* at) { return grey(*at); });
      return;
    case PixelMode::grey16:
      each.template operator()<2>([](const uint8_t* at) { return grey(cut_off(at)); });
      return;
    case PixelMode::palette:
      each.template operator()<1>([&](const uint8_t* at) { return header.palette[*at]; });
      return;
    case PixelMode::rgb:
      each.template operator()<3>([](const uint8_t* at) { return Rgba{at[0], at[1], at[2], 255}; });
      return;
    case PixelMode::rgba:
      each.template operator()<4>([](const uint8_t* at) { return Rgba{at[0], at[1], at[2], at[3]}; });
      return;
    case PixelMode::cmyk: each.template operator()<4>(from_inks); return;
  }
}

void convert_on_white(const ImageHeader& header, const uint8_t* pixels, int64_t area, uint8_t* out) {
  constexpr int64_t together = 4096;
  uint8_t rgba[4 * together];
  for (int64_t done = 0; done < area; done += together) {
    const int64_t count = std::min(together, area - done);
    convert_pixels(header, pixels + done * bytes_of(header.mode), count, 4, rgba);
    for (int64_t i = 0; i < 4 * count; i += 4) {
      for (int64_t c = 0; c < 3; ++c) *out++ = on_white(rgba[i + c], rgba[i + 3]);
    }
  }
}

}  // namespace mimo
