// Names and versions of the libraries that decode images.
#include "image_versions.h"

#include <cstdio>

#include <gif_lib.h>
// Must follow <cstdio>.
#include <jpeglib.h>
#include <libdeflate.h>
#include <webp/decode.h>

#define MIMO_TEXT_OF(value) #value
#define MIMO_TEXT(value) MIMO_TEXT_OF(value)

namespace mimo {

std::string image_versions() {
  const int webp = WebPGetDecoderVersion();
  const auto part = [&](int shift) { return std::to_string(webp >> shift & 0xff); };
  return "libjpeg-turbo " MIMO_TEXT(LIBJPEG_TURBO_VERSION) ", libwebp " + part(16) + "." + part(8) + "." + part(0) +
         ", giflib " MIMO_TEXT(GIFLIB_MAJOR) "." MIMO_TEXT(GIFLIB_MINOR) "." MIMO_TEXT(GIFLIB_RELEASE)
         ", libdeflate " LIBDEFLATE_VERSION_STRING;
}

}  // namespace mimo
