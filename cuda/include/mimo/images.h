/*
 * Images: functions on host memory without a device or stream, callable from any thread. Pixels are bytes, top row first,
 * channels interleaved. Formats: JPEG, PNG, WebP, GIF, BMP. MIMO_ERROR_DATA: the file is damaged; MIMO_ERROR_UNSUPPORTED:
 * another format or an unsupported variant. Memory use is bounded by the image size in the file's header.
 */
#pragma once

#include "library.h"

/* Reads the header alone. host_header[0..3] = width, height, channels as the file has them (1 grey or palette, 2 grey
 * and alpha, 3 RGB, 4 RGBA or CMYK), kind (0 JPEG, 1 PNG, 2 WebP, 3 GIF, 4 BMP). The first frame of an animation is read. */
MIMO_API int32_t mimo_image_inspect(const void* host_bytes, int64_t bytes, int32_t* host_header);
/* Decodes a file to 1 (grey), 3 (RGB) or 4 (RGBA) channels, as Pillow's Image.convert does. host_pixels [height, width,
 * channels]; pixel_bytes: its size. */
MIMO_API int32_t mimo_image_decode(const void* host_bytes, int64_t bytes, int32_t channels, void* host_pixels,
                                   int64_t pixel_bytes);
/* Decodes a file once, resizes it to each of host_sizes [sizes, 2] (width, height), and converts the results to RGB:
 * host_pixels holds them one after the other, pixel_bytes = 3 * the sum of their areas. Resizing is Pillow's for the file's
 * kind of pixels: nearest with a palette or one bit, bicubic otherwise, weighted by alpha where there is one. Sides are at
 * most 65535. */
MIMO_API int32_t mimo_image_decode_resized(const void* host_bytes, int64_t bytes, const int32_t* host_sizes, int32_t sizes,
                                           void* host_pixels, int64_t pixel_bytes);
/* Bicubic with antialiasing, in Pillow's integer arithmetic, of images with 1, 3 or 4 channels; the fourth channel is alpha, by
 * which the others are weighted. Sides are at most 65535. */
MIMO_API int32_t mimo_image_resize(const void* host_from, int32_t from_width, int32_t from_height, int32_t channels,
                                   void* host_to, int32_t to_width, int32_t to_height);
/* RGB pixels to (v / 255 - mean) / deviation; host_statistics [6]: 3 means, then 3 deviations. host_values: with patch = 0
 * planes [3, height, width]; otherwise vectors of square patches [height / patch * width / patch, 3 * patch * patch], the
 * channel outermost, and `patch` divides both sides. */
MIMO_API int32_t mimo_image_normalize(const void* host_pixels, int32_t width, int32_t height, int32_t patch,
                                      const float* host_statistics, float* host_values);
