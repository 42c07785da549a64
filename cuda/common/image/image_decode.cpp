// The image functions of mimo/images.h that read files.
#include <algorithm>
#include <cstring>

#include "decoding_memory.h"
#include "image_convert.h"
#include "image_file.h"
#include "image_orientation.h"
#include "image_resize.h"
#include "mimo/images.h"

namespace mimo {
namespace {

Bytes bytes_at(const void* bytes, int64_t size) {
  return {static_cast<const uint8_t*>(bytes), static_cast<size_t>(size < 0 ? 0 : size)};
}

std::unique_ptr<ImageFile> open_bytes(const void* bytes, int64_t size) { return open_image(bytes_at(bytes, size)); }

void decode(ImageFile& file, int channels, uint8_t* out) {
  const ImageHeader& header = file.header();
  const bool as_wanted = header.mode == mode_of_channels(channels) && !(channels == 4 && header.has_transparent_colour);
  const int64_t result = header.area() * channels;
  const DecodingMemory memory(result + file.working_bytes() + (as_wanted ? 0 : header.bytes()));
  if (as_wanted) {
    file.read(out);
    return;
  }
  const auto pixels = make_pixels(header.bytes());
  file.read(pixels.get());
  convert_pixels(header, pixels.get(), header.area(), channels, out);
}

/// Bytes that resizing takes beside the pixels and the result, at most: weighted colours, the result of the first pass, and
/// that of the second before it is converted.
int64_t resizing_bytes(const ImageHeader& header, ResizedSize to) {
  const int64_t pixel = bytes_of(header.mode);
  const int64_t weighted = header.mode == PixelMode::rgba ? header.bytes() : 0;
  const int64_t between = std::max(int64_t{header.width} * to.height, int64_t{to.width} * header.height);
  return weighted + pixel * (between + int64_t{to.width} * to.height);
}

void resize_file(const ImageHeader& header, const uint8_t* pixels, ResizedSize to, uint8_t* out) {
  const ResizedSize from{header.width, header.height};
  const int64_t area = int64_t{to.width} * to.height;
  if (from.width == to.width && from.height == to.height) {
    convert_pixels(header, pixels, area, 3, out);
    return;
  }
  if (header.mode == PixelMode::rgb) {
    resize_pixels(header.mode, pixels, from, out, to);
    return;
  }
  const auto resized = make_pixels(area * bytes_of(header.mode));
  resize_pixels(header.mode, pixels, from, resized.get(), to);
  convert_pixels(header, resized.get(), area, 3, out);
}

/// A picture as it is shown.
struct Shown {
  ResizedSize size;
  std::unique_ptr<uint8_t[]> pixels;
};

/// Bytes that decode_shown takes beside the file's own pixels: RGB before and after it is turned.
int64_t shown_bytes(const ImageHeader& header) { return 6 * header.area(); }

/// Decodes to RGB as transformers does: on white, and turned by its orientation.
Shown decode_shown(ImageFile& file, Bytes bytes) {
  const ImageHeader& header = file.header();
  Shown shown{{header.width, header.height}, make_pixels(3 * header.area())};
  if (header.mode == PixelMode::rgb && !header.has_transparent_colour) {
    file.read(shown.pixels.get());
  } else {
    const auto pixels = make_pixels(header.bytes());
    file.read(pixels.get());
    convert_on_white(header, pixels.get(), header.area(), shown.pixels.get());
  }
  const int orientation = orientation_of(header.format, bytes);
  if (orientation == 1) return shown;
  auto turned = make_pixels(3 * header.area());
  turn_pixels(shown.pixels.get(), header.width, header.height, orientation, turned.get());
  shown.pixels = std::move(turned);
  if (exchanges_sides(orientation)) std::swap(shown.size.width, shown.size.height);
  return shown;
}

/// (v - mean) / deviation on values from 0 to 255, in the order of transformers' fused rescaling and normalising.
struct Normalizer {
  float mean[3], deviation[3];

  explicit Normalizer(const float* statistics) {
    for (int c = 0; c < 3; ++c) {
      mean[c] = statistics[c] * 255.0f;
      deviation[c] = statistics[3 + c] * 255.0f;
    }
  }
  float operator()(float value, int channel) const { return (value - mean[channel]) / deviation[channel]; }
};

void write_patches(const Shown& shown, ResizedSize to, int patch, const Normalizer& normalized, float* out) {
  const int64_t area = int64_t{patch} * patch;
  resize_rgb_unrounded(shown.pixels.get(), shown.size, to, [&](int row, const float* values) {
    float* patches = out + 3 * area * (row / patch) * (to.width / patch) + int64_t{row % patch} * patch;
    for (int x = 0; x < to.width; ++x, values += 3) {
      float* at = patches + 3 * area * (x / patch) + x % patch;
      for (int c = 0; c < 3; ++c) at[c * area] = normalized(values[c], c);
    }
  });
}

constexpr int largest_side = 65535;

}  // namespace
}  // namespace mimo

extern "C" int32_t mimo_image_inspect(const void* host_bytes, int64_t bytes, int32_t* host_header) {
  return mimo::guard([&] {
    const auto file = mimo::open_bytes(host_bytes, bytes);
    const mimo::ImageHeader& header = file->header();
    host_header[0] = header.width;
    host_header[1] = header.height;
    host_header[2] = header.channels;
    host_header[3] = static_cast<int32_t>(header.format);
    host_header[4] = mimo::orientation_of(header.format, mimo::bytes_at(host_bytes, bytes));
    host_header[5] = header.mode == mimo::PixelMode::grey16 ? 1 : 0;
  });
}

extern "C" int32_t mimo_image_decode(const void* host_bytes, int64_t bytes, int32_t channels, void* host_pixels,
                                     int64_t pixel_bytes) {
  return mimo::guard([&] {
    MIMO_REQUIRE(channels == 1 || channels == 3 || channels == 4, "mimo_image_decode");
    const auto file = mimo::open_bytes(host_bytes, bytes);
    MIMO_REQUIRE(pixel_bytes == file->header().area() * channels, "mimo_image_decode");
    mimo::decode(*file, channels, static_cast<uint8_t*>(host_pixels));
  });
}

extern "C" int32_t mimo_image_decode_resized(const void* host_bytes, int64_t bytes, int32_t decoding,
                                             const int32_t* host_sizes, int32_t sizes, void* host_pixels,
                                             int64_t pixel_bytes) {
  return mimo::guard([&] {
    using mimo::largest_side;
    MIMO_REQUIRE(decoding == MIMO_IMAGE_DECODING_ENERGON || decoding == MIMO_IMAGE_DECODING_TRANSFORMERS,
                 "mimo_image_decode_resized");
    int64_t wanted = 0;
    for (int32_t i = 0; i < sizes; ++i) {
      const int32_t width = host_sizes[2 * i], height = host_sizes[2 * i + 1];
      MIMO_REQUIRE(width > 0 && height > 0, "mimo_image_decode_resized");
      MIMO_REQUIRE(width <= largest_side && height <= largest_side, "mimo_image_decode_resized");
      wanted += int64_t{3} * width * height;
    }
    MIMO_REQUIRE(pixel_bytes == wanted, "mimo_image_decode_resized");
    const auto file = mimo::open_bytes(host_bytes, bytes);
    const mimo::ImageHeader& header = file->header();
    auto* out = static_cast<uint8_t*>(host_pixels);
    const auto each = [&](auto resize) {
      for (int32_t i = 0; i < sizes; ++i) {
        const mimo::ResizedSize size{host_sizes[2 * i], host_sizes[2 * i + 1]};
        resize(size, out);
        out += int64_t{3} * size.width * size.height;
      }
    };
    const bool as_shown = decoding == MIMO_IMAGE_DECODING_TRANSFORMERS;
    int64_t working = file->working_bytes();
    for (int32_t i = 0; i < sizes; ++i) {
      const mimo::ResizedSize size{host_sizes[2 * i], host_sizes[2 * i + 1]};
      working = std::max(working, mimo::resizing_bytes(header, size));
    }
    const mimo::DecodingMemory memory(header.bytes() + working + wanted + (as_shown ? mimo::shown_bytes(header) : 0));
    if (as_shown) {
      const mimo::Shown shown = mimo::decode_shown(*file, mimo::bytes_at(host_bytes, bytes));
      each([&](mimo::ResizedSize size, uint8_t* to) {
        mimo::resize_pixels(mimo::PixelMode::rgb, shown.pixels.get(), shown.size, to, size);
      });
      return;
    }
    const auto pixels = mimo::make_pixels(header.bytes());
    file->read(pixels.get());
    each([&](mimo::ResizedSize size, uint8_t* to) { mimo::resize_file(header, pixels.get(), size, to); });
  });
}

extern "C" int32_t mimo_image_decode_patches(const void* host_bytes, int64_t bytes, int32_t width, int32_t height,
                                             int32_t patch, const float* host_statistics, float* host_values) {
  return mimo::guard([&] {
    using mimo::largest_side;
    MIMO_REQUIRE(patch > 0 && width > 0 && height > 0, "mimo_image_decode_patches");
    MIMO_REQUIRE(width <= largest_side && height <= largest_side, "mimo_image_decode_patches");
    MIMO_REQUIRE(width % patch == 0 && height % patch == 0, "mimo_image_decode_patches");
    const auto file = mimo::open_bytes(host_bytes, bytes);
    const mimo::ImageHeader& header = file->header();
    const int64_t values = int64_t{3} * sizeof(float) * width * height;
    const int64_t working = std::max(file->working_bytes(), mimo::resizing_bytes(header, {width, height}));
    const mimo::DecodingMemory memory(header.bytes() + working + values + mimo::shown_bytes(header));
    const mimo::Shown shown = mimo::decode_shown(*file, mimo::bytes_at(host_bytes, bytes));
    mimo::write_patches(shown, {width, height}, patch, mimo::Normalizer(host_statistics), host_values);
  });
}
