// JPEG and PNG decoding through stb_image, with what that leaves open: input that ends early is an error, sizes are
// bounded, and greys are those of the Pillow library.
#include <algorithm>
#include <climits>
#include <cstring>
#include <memory>

#include "status.h"

#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_ONLY_JPEG
#define STBI_ONLY_PNG
#define STBI_NO_STDIO
#define STBI_NO_LINEAR
#define STBI_NO_HDR
#define STBI_MAX_DIMENSIONS 65535
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#include "../third_party/stb_image.h"
#pragma GCC diagnostic pop

namespace mimo {
namespace {

/// More pixels than this are taken for damage: 268 million, 16384 x 16384.
constexpr int64_t largest_area = int64_t{1} << 28;

/// The file's bytes, and whether the decoder asked for more than there are.
struct Source {
  const uint8_t* bytes;
  int64_t size;
  int64_t position;
  bool ran_out;
};

int read(void* user, char* to, int count) {
  auto& source = *static_cast<Source*>(user);
  const int64_t available = std::min<int64_t>(count, source.size - source.position);
  if (available <= 0) {
    source.ran_out = true;
    return 0;
  }
  std::memcpy(to, source.bytes + source.position, static_cast<size_t>(available));
  source.position += available;
  return static_cast<int>(available);
}

void skip(void* user, int count) {
  auto& source = *static_cast<Source*>(user);
  source.position += count;
  if (source.position > source.size) source.ran_out = true;
  source.position = std::clamp<int64_t>(source.position, 0, source.size);
}

int at_end(void* user) {
  const auto& source = *static_cast<const Source*>(user);
  return source.position >= source.size;
}

constexpr stbi_io_callbacks callbacks = {read, skip, at_end};

[[noreturn]] void refuse(const std::string& why) { throw Error(MIMO_ERROR_DATA, "the image " + why); }

struct Size {
  int width;
  int height;
  int channels;
};

Source source_of(const void* bytes, int64_t size) {
  const auto* data = static_cast<const uint8_t*>(bytes);
  if (data == nullptr || size < 8 || size > INT_MAX) refuse("has no content");
  const bool jpeg = data[0] == 0xFF && data[1] == 0xD8;
  const bool png = std::memcmp(data, "\x89PNG\r\n\x1a\n", 8) == 0;
  if (!jpeg && !png) refuse("is neither JPEG nor PNG");
  return {data, size, 0, false};
}

/// stb_image's reasons are short words; they are quoted.
[[noreturn]] void refuse_decoding(const Source& source) {
  if (source.ran_out) refuse("ends too early");
  const char* reason = stbi_failure_reason();
  refuse(std::string("is damaged (") + (reason == nullptr ? "unknown" : reason) + ")");
}

Size inspect(const void* bytes, int64_t size) {
  Source source = source_of(bytes, size);
  Size found{};
  if (!stbi_info_from_callbacks(&callbacks, &source, &found.width, &found.height, &found.channels)) {
    refuse_decoding(source);
  }
  if (found.width <= 0 || found.height <= 0 || int64_t{found.width} * found.height > largest_area) {
    refuse("is too large: " + std::to_string(found.width) + " x " + std::to_string(found.height));
  }
  return found;
}

struct Free {
  void operator()(uint8_t* pixels) const { stbi_image_free(pixels); }
};

void decode(const void* bytes, int64_t size, int channels, uint8_t* pixels, int64_t pixel_bytes) {
  MIMO_REQUIRE(channels == 1 || channels == 3 || channels == 4, "mimo_image_decode");
  const Size expected = inspect(bytes, size);
  const int64_t area = int64_t{expected.width} * expected.height;
  MIMO_REQUIRE(pixel_bytes == area * channels, "mimo_image_decode");
  Source source = source_of(bytes, size);
  // Grey of a coloured image is made below; an image that is grey already stays as it is.
  const bool to_grey = channels == 1 && expected.channels >= 3;
  Size found{};
  const std::unique_ptr<uint8_t, Free> decoded(stbi_load_from_callbacks(
      &callbacks, &source, &found.width, &found.height, &found.channels, to_grey ? 3 : channels));
  if (!decoded || source.ran_out) refuse_decoding(source);
  if (found.width != expected.width || found.height != expected.height) refuse("changes its size");
  if (!to_grey) {
    std::memcpy(pixels, decoded.get(), static_cast<size_t>(pixel_bytes));
    return;
  }
  // ITU-R 601 luma in 16-bit fixed point, as Pillow rounds it.
  const uint8_t* from = decoded.get();
  for (int64_t i = 0; i < area; ++i, from += 3) {
    pixels[i] = static_cast<uint8_t>((from[0] * 19595u + from[1] * 38470u + from[2] * 7471u + 0x8000u) >> 16);
  }
}

}  // namespace
}  // namespace mimo

extern "C" int32_t mimo_image_inspect(const void* host_bytes, int64_t bytes, int32_t* host_size) {
  return mimo::guard([&] {
    const mimo::Size size = mimo::inspect(host_bytes, bytes);
    host_size[0] = size.width;
    host_size[1] = size.height;
    host_size[2] = size.channels;
  });
}

extern "C" int32_t mimo_image_decode(const void* host_bytes, int64_t bytes, int32_t channels, void* host_pixels,
                                     int64_t pixel_bytes) {
  return mimo::guard(
      [&] { mimo::decode(host_bytes, bytes, channels, static_cast<uint8_t*>(host_pixels), pixel_bytes); });
}
