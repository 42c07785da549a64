// TMA descriptors (CUtensorMap) for sm_90 and later.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace mimo::cuda {

/// Boxes of `box_rows` rows x 64 bf16 columns in the 128-byte swizzle that wgmma reads. `data` is aligned to 16 bytes,
/// `width` is a multiple of 8. matrices_map: tensor [count][rows][width], box coordinates (column, row, matrix).
CUtensorMap matrices_map(const void* data, int64_t count, int64_t rows, int64_t width, uint32_t box_rows);

/// matrices_map for fp32 matrices, boxes of 32 columns; `width` a multiple of 4.
CUtensorMap sums_map(float* data, int64_t count, int64_t rows, int64_t width, uint32_t box_rows);

/// Groups of consecutive rows of one matrix. The box from row r of the group first .. last - 1 has the coordinates
/// (column, ragged_end - (last - first) + r, last, ragged_end); rows past the group's last are zero-filled.
CUtensorMap ragged_map(const void* data, int64_t width, uint32_t box_rows);
constexpr int ragged_end = 1 << 30;

/// matrices_map and ragged_map for 1-byte elements, boxes of 128 columns; `width` a multiple of 16.
CUtensorMap byte_matrices_map(const void* data, int64_t count, int64_t rows, int64_t width, uint32_t box_rows);
CUtensorMap byte_ragged_map(const void* data, int64_t width, uint32_t box_rows);

/// ragged_map for heads of tokens, heads `head_stride` elements apart: a box holds rows of one head and has the
/// coordinates (column, head, ragged_end - (last - first) + r, last, ragged_end). Columns past head_dim are zero-filled
/// too. Strides are multiples of 8.
CUtensorMap heads_map(const void* data, int64_t heads, int64_t head_dim, int64_t head_stride, int64_t token_stride,
                      uint32_t box_rows);

/// Columns 64 .. 79 of the same heads with rows of 32 bytes in shared memory (32-byte swizzle). Together with a
/// heads_map box a row takes 160 bytes instead of 256, for operands whose k runs along the head.
CUtensorMap heads_end_map(const void* data, int64_t heads, int64_t head_stride, int64_t token_stride, uint32_t box_rows);

}  // namespace mimo::cuda
