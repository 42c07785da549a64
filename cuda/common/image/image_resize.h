// Image resizing equal to Pillow's.
#pragma once
#include <functional>

#include "image_file.h"

namespace mimo {

struct ResizedSize {
  int width;
  int height;
};

/// Resizes as Pillow does for the mode: nearest neighbour for bits and palettes, otherwise bicubic with antialiasing,
/// with colours weighted by alpha if present. `out` has to.width * to.height * bytes_of(mode) bytes.
void resize_pixels(PixelMode mode, const uint8_t* in, ResizedSize from, uint8_t* out, ResizedSize to);

/// Receives a row of RGB values, from 0 to 255 and beyond both where bicubic weights overshoot.
using TakeRow = std::function<void(int row, const float* values)>;

/// Resizes RGB pixels by the same filter in fp32, without rounding, as PyTorch does on floats; hands on row after row.
void resize_rgb_unrounded(const uint8_t* in, ResizedSize from, ResizedSize to, const TakeRow& take);

}  // namespace mimo
