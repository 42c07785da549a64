// Pixels of any mode as grey, RGB or RGBA, as Pillow's convert makes them.
#pragma once
#include "image_file.h"

namespace mimo {

/// The mode that needs no conversion for that number of channels: 1, 3 or 4.
PixelMode mode_of_channels(int channels);

/// Converts `area` pixels of a file's mode. `out` has channels * area bytes.
void convert_pixels(const ImageHeader& header, const uint8_t* pixels, int64_t area, int channels, uint8_t* out);

}  // namespace mimo
