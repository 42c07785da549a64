// Pixels in the encoder's format: normalised, as planes or patch vectors (docs/spec/vision.md §2.1, §5.4, §G14).
#include "status.h"

namespace mimo {
namespace {

/// Table of normalised byte values for each channel: (v / 255 - mean) / deviation, each step rounded to fp32.
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

}  // namespace
}  // namespace mimo

extern "C" int32_t mimo_image_normalize(const void* host_pixels, int32_t width, int32_t height, int32_t patch,
                                        const float* host_statistics, float* host_values) {
  return mimo::guard([&] {
    MIMO_REQUIRE(width > 0 && height > 0 && patch >= 0, "mimo_image_normalize");
    MIMO_REQUIRE(patch == 0 || (width % patch == 0 && height % patch == 0), "mimo_image_normalize");
    mimo::normalize(static_cast<const uint8_t*>(host_pixels), width, height, patch, host_statistics, host_values);
  });
}
