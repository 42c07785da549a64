// Resizing as the Pillow library does it.
#pragma once
#include "image_file.h"

namespace mimo {

struct ResizedSize {
  int width;
  int height;
};

/// Resizes as Pillow resizes an image of that mode: bits and palettes take the nearest pixel, the others are bicubic with
/// antialiasing, colours weighted by alpha where there is one. `out` has to.width * to.height * bytes_of(mode) bytes.
void resize_pixels(PixelMode mode, const uint8_t* in, ResizedSize from, uint8_t* out, ResizedSize to);

}  // namespace mimo
