// The orientation that a camera wrote into a file, and turning pixels by it.
#pragma once
#include "image_file.h"

namespace mimo {

/// EXIF's orientation of a picture, 1 (upright) to 8, as Pillow's exif_transpose reads it: of EXIF, else of an XMP packet.
/// 1 where neither can be read.
int orientation_of(ImageFormat format, Bytes file);

/// Whether a picture of an orientation is shown with its sides exchanged.
inline bool exchanges_sides(int orientation) { return orientation >= 5; }

/// Copies width * height RGB pixels as they are stored to the way they are shown.
void turn_pixels(const uint8_t* in, int width, int height, int orientation, uint8_t* out);

}  // namespace mimo
