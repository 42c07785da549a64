/* Image files and pixels. */
#pragma once

#include "library.h"

/* Plain functions on host memory: no device, no stream; any thread may call them. Pixels are 8-bit, rows from the top,
 * channels interleaved. Files are JPEG, PNG, WebP, GIF or BMP; damaged ones end with MIMO_ERROR_DATA, kinds that Pillow
 * reads besides with MIMO_ERROR_UNSUPPORTED. Memory is bounded by the size in the header. */

/* Reads the header alone. host_header[0..3] = width, height, channels as the file has them (1 grey or palette, 2 grey
 * and alpha, 3 RGB, 4 RGBA or CMYK), kind (0 JPEG, 1 PNG, 2 WebP, 3 GIF, 4 BMP). An animation gives its first
 * picture. */
MIMO_API int32_t mimo_image_inspect(const void* host_bytes, int64_t bytes, int32_t* host_header);
/* Decodes a file to 1 (grey), 3 (RGB) or 4 (RGBA) channels, as Pillow's convert makes them; pixel_bytes = width * height *
 * channels. */
MIMO_API int32_t mimo_image_decode(const void* host_bytes, int64_t bytes, int32_t channels, void* host_pixels,
                                   int64_t pixel_bytes);
/* Decodes a file once, resizes it to each of `sizes` sizes (pairs of width and height) as Pillow resizes an image of its
 * kind — nearest with a palette or one bit, weighted by alpha, else bicubic — and makes it RGB only then; images one after
 * the other, pixel_bytes = 3 * the sum of their areas. */
MIMO_API int32_t mimo_image_decode_resized(const void* host_bytes, int64_t bytes, const int32_t* host_sizes, int32_t sizes,
                                           void* host_pixels, int64_t pixel_bytes);
/* Bicubic with antialiasing in Pillow's integer arithmetic; 4 channels are weighted by the last one meanwhile. */
MIMO_API int32_t mimo_image_resize(const void* host_from, int32_t from_width, int32_t from_height, int32_t channels,
                                   void* host_to, int32_t to_width, int32_t to_height);
/* RGB pixels to (v / 255 - mean) / deviation; host_statistics = 3 means, 3 deviations. patch = 0: planes
 * [3, height, width]; otherwise patch vectors [height / patch * width / patch, 3 * patch * patch], channel first. */
MIMO_API int32_t mimo_image_normalize(const void* host_pixels, int32_t width, int32_t height, int32_t patch,
                                      const float* host_statistics, float* host_values);
