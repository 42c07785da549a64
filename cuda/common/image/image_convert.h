// Conversion of pixels of any mode to grey, RGB or RGBA, equal to Pillow's convert.
#pragma once
#include "image_file.h"

namespace mimo {

/// The mode that needs no conversion for 1, 3 or 4 channels.
PixelMode mode_of_channels(int channels);

/// Converts `area` pixels of a file's mode. `out` has channels * area bytes.
void convert_pixels(const ImageHeader& header, const uint8_t* pixels, int64_t area, int channels, uint8_t* out);

/// Converts `area` pixels to RGB as transformers' convert_to_rgb does: transparent ones are composed on white, whichever way
/// the file says that they are.
void convert_on_white(const ImageHeader& header, const uint8_t* pixels, int64_t area, uint8_t* out);

}  // namespace mimo
