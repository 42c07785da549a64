// Descriptions of tensors for the copy engine of sm_90 and later.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace mimo::cuda {

/// bf16 tensors and the box that one copy moves: `box_rows` rows of 64 columns, swizzled as products of warpgroups read
/// them. `data` on 16 bytes, `width` a multiple of 8.
/// matrices[count][rows][width]; a box is at (column, row, matrix).
CUtensorMap matrices_map(const void* data, int64_t count, int64_t rows, int64_t width, uint32_t box_rows);

/// matrices_map for fp32 matrices and boxes of 32 columns; `width` a multiple of 4.
CUtensorMap sums_map(float* data, int64_t count, int64_t rows, int64_t width, uint32_t box_rows);

/// Groups of rows of one matrix. A box that starts at row r of the group of rows first .. last - 1 is at (column,
/// ragged_end - (last - first) + r, last, ragged_end), and rows behind the group's last one read as zeros.
CUtensorMap ragged_map(const void* data, int64_t width, uint32_t box_rows);
constexpr int ragged_end = 1 << 30;

/// Both of elements of one byte, boxes of 128 columns; `width` a multiple of 16.
CUtensorMap byte_matrices_map(const void* data, int64_t count, int64_t rows, int64_t width, uint32_t box_rows);
CUtensorMap byte_ragged_map(const void* data, int64_t width, uint32_t box_rows);

/// ragged_map for heads of a token, `head_stride` elements from one to the next: a box is rows of one head, at
/// (column, head, ragged_end - (last - first) + r, last, ragged_end), and columns behind the head read as zeros too.
/// Strides in multiples of 8.
CUtensorMap heads_map(const void* data, int64_t heads, int64_t head_dim, int64_t head_stride, int64_t token_stride,
                      uint32_t box_rows);

/// Columns 64 .. of the same heads, 16 of them, as rows of 32 bytes in shared memory: the second half of a tile whose columns
/// no product has as its own, which so takes 160 bytes a row.
CUtensorMap heads_end_map(const void* data, int64_t heads, int64_t head_stride, int64_t token_stride, uint32_t box_rows);

}  // namespace mimo::cuda
