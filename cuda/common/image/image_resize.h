// Image resizing equal to Pillow's.
#pragma once
#include "image_file.h"

namespace mimo {

struct ResizedSize {
  int width;
  int height;
};

/// Resizes as Pillow does for the mode: nearest neighbour for bits and palettes, otherwise bicubic with antialiasing,
/// with colours weighted by alpha if present. `out` has to.width * to.height * bytes_of(mode) bytes.
void resize_pixels(PixelMode mode, const uint8_t* in, ResizedSize from, uint8_t* out, ResizedSize to);

}  // namespace mimo
