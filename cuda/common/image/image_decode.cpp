// The image functions of mimo/images.h that read files.
#include <algorithm>
#include <cstring>

#include "image_convert.h"
#include "image_file.h"
#include "image_resize.h"

namespace mimo {
namespace {

std::unique_ptr<ImageFile> open_bytes(const void* bytes, int64_t size) {
  return open_image({static_cast<const uint8_t*>(bytes), static_cast<size_t>(size < 0 ? 0 : size)});
}

void decode(ImageFile& file, int channels, uint8_t* out) {
  const ImageHeader& header = file.header();
  const bool as_wanted = header.mode == mode_of_channels(channels);
  if (as_wanted && !(channels == 4 && header.has_transparent_colour)) {
    file.read(out);
    return;
  }
  const auto pixels = make_pixels(header.bytes());
  file.read(pixels.get());
  convert_pixels(header, pixels.get(), header.area(), channels, out);
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

extern "C" int32_t mimo_image_decode_resized(const void* host_bytes, int64_t bytes, const int32_t* host_sizes,
                                             int32_t sizes, void* host_pixels, int64_t pixel_bytes) {
  return mimo::guard([&] {
    using mimo::largest_side;
    int64_t wanted = 0;
    for (int32_t i = 0; i < sizes; ++i) {
      const int32_t width = host_sizes[2 * i], height = host_sizes[2 * i + 1];
      MIMO_REQUIRE(width > 0 && height > 0, "mimo_image_decode_resized");
      MIMO_REQUIRE(width <= largest_side && height <= largest_side, "mimo_image_decode_resized");
      wanted += int64_t{3} * width * height;
    }
    MIMO_REQUIRE(pixel_bytes == wanted, "mimo_image_decode_resized");
    const auto file = mimo::open_bytes(host_bytes, bytes);
    const auto pixels = mimo::make_pixels(file->header().bytes());
    file->read(pixels.get());
    auto* out = static_cast<uint8_t*>(host_pixels);
    for (int32_t i = 0; i < sizes; ++i) {
      const mimo::ResizedSize size{host_sizes[2 * i], host_sizes[2 * i + 1]};
      mimo::resize_file(file->header(), pixels.get(), size, out);
      out += int64_t{3} * size.width * size.height;
    }
  });
}
