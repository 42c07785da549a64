/*
 * Images: functions on host memory without a device or stream, callable from any thread. Pixels are bytes, top row first,
 * channels interleaved. Formats: JPEG, PNG, WebP, GIF, BMP. MIMO_ERROR_DATA: the file is damaged; MIMO_ERROR_UNSUPPORTED:
 * another format or an unsupported variant. Memory use is bounded by the image size in the file's header, and that of all
 * threads of the process together by mimo_image_memory. Time is bounded by the size too: for a progressive JPEG, the sum of
 * its scans.
 */
#pragma once

#include "library.h"

/* How a file becomes RGB. Energon's way is Pillow's: resized in the file's kind of pixels, as they are stored, then
 * converted, which drops alpha. transformers' way (datasets' Image, then convert_to_rgb): transparency is composed on white,
 * the picture is turned by its EXIF orientation, and RGB is resized. */
enum mimo_image_decoding { MIMO_IMAGE_DECODING_ENERGON = 0, MIMO_IMAGE_DECODING_TRANSFORMERS = 1 };

/* Most bytes that images take while they are decoded at the same time in this process: others wait. An image that takes more
 * is decoded alone. 1 GiB until this is called. */
MIMO_API int32_t mimo_image_memory(int64_t bytes);
/* Reads a file's header. host_header[0..5] = width and height as they are stored, channels as the file has them (1 grey or
 * palette, 2 grey and alpha, 3 RGB, 4 RGBA or CMYK), kind (0 JPEG, 1 PNG, 2 WebP, 3 GIF, 4 BMP), EXIF orientation (1 to 8; above
 * 4 the picture is shown with its sides exchanged), 1 for greys of 16 bits, else 0. The first frame of an animation is read. */
MIMO_API int32_t mimo_image_inspect(const void* host_bytes, int64_t bytes, int32_t* host_header);
/* Decodes a file to 1 (grey), 3 (RGB) or 4 (RGBA) channels, as stored, as Pillow's Image.convert does. host_pixels [height, width,
 * channels]; pixel_bytes: its size. */
MIMO_API int32_t mimo_image_decode(const void* host_bytes, int64_t bytes, int32_t channels, void* host_pixels,
                                   int64_t pixel_bytes);
/* Decodes a file once, and resizes it to each of host_sizes [sizes, 2] (width, height): host_pixels holds the results in RGB
 * one after the other, pixel_bytes = 3 * the sum of their areas. `decoding`: of mimo_image_decoding. Resizing is Pillow's:
 * bicubic; with Energon's decoding nearest with a palette or one bit, weighted by alpha where there is one. Sides are at most
 * 65535. */
MIMO_API int32_t mimo_image_decode_resized(const void* host_bytes, int64_t bytes, int32_t decoding,
                                           const int32_t* host_sizes, int32_t sizes, void* host_pixels, int64_t pixel_bytes);
/* Decodes a file in transformers' way, resizes it to width x height by the bicubic filter in fp32, without rounding or
 * clamping, and normalises: host_values holds the vectors of mimo_image_normalize. transformers' processor of Nemotron models
 * with dynamic resolution does this. Sides are at most 65535 and multiples of `patch`. */
MIMO_API int32_t mimo_image_decode_patches(const void* host_bytes, int64_t bytes, int32_t width, int32_t height,
                                           int32_t patch, const float* host_statistics, float* host_values);
/* Bicubic with antialiasing, in Pillow's integer arithmetic, of images with 1, 3 or 4 channels; the fourth channel is alpha, by
 * which the others are weighted. Sides are at most 65535. */
MIMO_API int32_t mimo_image_resize(const void* host_from, int32_t from_width, int32_t from_height, int32_t channels,
                                   void* host_to, int32_t to_width, int32_t to_height);
/* RGB pixels to (v / 255 - mean) / deviation; host_statistics [6]: 3 means, then 3 deviations. host_values: with patch = 0
 * planes [3, height, width]; otherwise vectors of square patches [height / patch * width / patch, 3 * patch * patch], the
 * channel outermost, and `patch` divides both sides. */
MIMO_API int32_t mimo_image_normalize(const void* host_pixels, int32_t width, int32_t height, int32_t patch,
                                      const float* host_statistics, float* host_values);
