// Image files by format: headers, and pixels in Pillow's modes.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "status.h"

namespace mimo {

using Bytes = std::span<const uint8_t>;

/// File formats, numbered as in mimo_image_inspect.
enum class ImageFormat : int32_t { jpeg = 0, png = 1, webp = 2, gif = 3, bmp = 4 };

/// Pillow's modes: 1, L, I;16, P, RGB, RGBA (also LA, with the grey repeated), CMYK.
enum class PixelMode { bit, grey, grey16, palette, rgb, rgba, cmyk };

/// Bytes of a pixel in memory: a bit is stored as 0 or 255, 16 bits in native byte order.
constexpr int bytes_of(PixelMode mode) {
  switch (mode) {
    case PixelMode::grey16: return 2;
    case PixelMode::rgb: return 3;
    case PixelMode::rgba:
    case PixelMode::cmyk: return 4;
    default: return 1;
  }
}

struct ImageHeader {
  ImageFormat format;
  PixelMode mode;
  int width;
  int height;
  /// Channels in the file: 1 grey or palette, 2 grey and alpha, 3 or 4.
  int channels;
  /// RGB colours and alphas of a palette; indexes beyond the file's palette are opaque black.
  std::array<std::array<uint8_t, 4>, 256> palette;
  /// The colour that becomes transparent if alpha is requested; a grey is in all three channels.
  bool has_transparent_colour = false;
  std::array<uint8_t, 3> transparent_colour{};

  int64_t area() const { return int64_t{width} * height; }
  int64_t bytes() const { return area() * bytes_of(mode); }
};

/// An image file whose header has been read.
class ImageFile {
 public:
  virtual ~ImageFile() = default;
  const ImageHeader& header() const { return header_; }
  /// Bytes that read() takes beside the pixels, at most.
  virtual int64_t working_bytes() const = 0;
  /// Decodes to header().bytes() bytes, top row first. May be called once. Throws MIMO_ERROR_DATA for damaged files.
  virtual void read(uint8_t* pixels) = 0;

 protected:
  ImageFile(ImageFormat format, PixelMode mode) {
    header_.format = format;
    header_.mode = mode;
    for (auto& colour : header_.palette) colour = {0, 0, 0, 255};
  }
  /// Sets the size; throws MIMO_ERROR_DATA if it is empty or above Pillow's limit.
  void set_size(int64_t width, int64_t height);

  ImageHeader header_{};
};

/// Reads a file's header; `bytes` must outlive the result. Throws MIMO_ERROR_DATA for damaged files and
/// MIMO_ERROR_UNSUPPORTED for a format that only Pillow reads.
std::unique_ptr<ImageFile> open_image(Bytes bytes);

std::unique_ptr<ImageFile> open_jpeg(Bytes bytes);
std::unique_ptr<ImageFile> open_png(Bytes bytes);
std::unique_ptr<ImageFile> open_webp(Bytes bytes);
std::unique_ptr<ImageFile> open_gif(Bytes bytes);
std::unique_ptr<ImageFile> open_bmp(Bytes bytes);

[[noreturn]] inline void refuse_image(const std::string& why) { throw Error(MIMO_ERROR_DATA, "the image " + why); }
[[noreturn]] inline void refuse_damaged(const std::string& why) { refuse_image("is damaged (" + why + ")"); }
[[noreturn]] inline void refuse_cut_off() { refuse_image("ends too early"); }
/// Throws for a file of a supported format with an unsupported feature.
[[noreturn]] inline void refuse_unread(const std::string& kind) {
  throw Error(MIMO_ERROR_UNSUPPORTED, "the image is " + kind);
}

/// Allocates pixels without clearing them.
inline std::unique_ptr<uint8_t[]> make_pixels(int64_t bytes) {
  return std::unique_ptr<uint8_t[]>(new uint8_t[static_cast<size_t>(bytes)]);
}

}  // namespace mimo
