// Detects the format of an image file and limits the image's size.
#include "image_file.h"

#include <string_view>

namespace mimo {
namespace {

/// Pillow rejects more pixels as a decompression bomb (twice its MAX_IMAGE_PIXELS).
constexpr int64_t largest_area = 178'956'970;
/// libpng's limit too. Resizing allocates filter taps for each pixel of a side.
constexpr int64_t largest_side = 1'000'000;

struct Kind {
  std::string_view signature;
  size_t at;
  const char* name;
};

/// Formats that Pillow reads and this code does not: the Python package would deliver a sample with such an image.
constexpr Kind unread_kinds[] = {
    {{"II*\0", 4}, 0, "a TIFF"},
    {{"MM\0*", 4}, 0, "a TIFF"},
    {{"II+\0", 4}, 0, "a TIFF"},
    {{"MM\0+", 4}, 0, "a TIFF"},
    {{"\0\0\0\x0cjP  \r\n\x87\n", 12}, 0, "a JPEG 2000 file"},
    {{"\xff\x4f\xff\x51", 4}, 0, "a JPEG 2000 file"},
    {"ftypavif", 4, "an AVIF"},
    {"ftypavis", 4, "an AVIF"},
    {"ftypmif1", 4, "an AVIF or HEIF"},
    {{"\0\0\1\0", 4}, 0, "a Windows icon"},
    {{"\0\0\2\0", 4}, 0, "a Windows cursor or Targa image"},
    {{"\0\0\x0a\0", 4}, 0, "a Targa image"},
    {{"\x0a\5\1", 3}, 0, "a PCX"},
    {"icns", 0, "a macOS icon"},
    {"8BPS", 0, "a Photoshop document"},
    {"qoif", 0, "a QOI"},
    {"DDS ", 0, "a DDS"},
    {"%!PS", 0, "a PostScript file"},
    {{"\x01\xda", 2}, 0, "an SGI image"},
    {{"\x59\xa6\x6a\x95", 4}, 0, "a Sun raster image"},
};

bool has(Bytes bytes, std::string_view signature, size_t at = 0) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return text.size() >= at && text.substr(at).starts_with(signature);
}

/// PBM, PGM, PPM and related formats: a P, a letter or digit, white space.
bool is_portable_map(Bytes bytes) {
  constexpr std::string_view kinds = "123456fFy";
  constexpr std::string_view blanks = " \t\r\n";
  return bytes.size() > 2 && bytes[0] == 'P' && kinds.find(static_cast<char>(bytes[1])) != kinds.npos &&
         blanks.find(static_cast<char>(bytes[2])) != blanks.npos;
}

}  // namespace

void ImageFile::set_size(int64_t width, int64_t height) {
  if (width <= 0 || height <= 0) refuse_image("has no pixels");
  if (width > largest_side || height > largest_side || width > largest_area / height) {
    refuse_image("is too large: " + std::to_string(width) + " x " + std::to_string(height));
  }
  header_.width = static_cast<int>(width);
  header_.height = static_cast<int>(height);
}

std::unique_ptr<ImageFile> open_image(Bytes bytes) {
  if (bytes.data() == nullptr || bytes.size() < 8) refuse_image("has no content");
  if (bytes.size() > INT32_MAX) refuse_image("is a file of more than 2 GiB");
  if (has(bytes, "\xff\xd8\xff")) return open_jpeg(bytes);
  if (has(bytes, "\x89PNG\r\n\x1a\n")) return open_png(bytes);
  if (has(bytes, "RIFF") && has(bytes, "WEBP", 8)) return open_webp(bytes);
  if (has(bytes, "GIF87a") || has(bytes, "GIF89a")) return open_gif(bytes);
  if (has(bytes, "BM")) return open_bmp(bytes);
  for (const Kind& kind : unread_kinds) {
    if (has(bytes, kind.signature, kind.at)) refuse_unread(kind.name);
  }
  if (is_portable_map(bytes)) refuse_unread("a portable pixmap");
  refuse_image("is neither JPEG, PNG, WebP, GIF nor BMP");
}

}  // namespace mimo
