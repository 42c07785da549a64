// Operands in e4m3 (docs/spec/moe-performance.md §1.7).
#pragma once
#include "device.h"

namespace mimo::cuda {

constexpr int64_t e4m3_run = 128;

/// Elements from one run's factors to the next one's: the copy engine takes four at a time.
constexpr int64_t e4m3_factor_stride(int64_t rows) { return (rows + 3) / 4 * 4; }

/// Values, and the inverses of the powers of two that they were multiplied by.
struct E4m3Operand {
  uint8_t* values;
  float* factors;  // [runs, factor_stride]
  int64_t factor_stride;
};
/// Memory that a caller gives, for [rows, columns].
inline E4m3Operand e4m3_operand(const void* values, const float* factors, int64_t rows) {
  return {static_cast<uint8_t*>(const_cast<void*>(values)), const_cast<float*>(factors), e4m3_factor_stride(rows)};
}

/// x [rows, width] in bf16 in runs of 128 columns: values [rows, width], factors of every run and row. Rows from `live` on are left
/// alone; width a multiple of 16.
void quantize_rows(mimo_stream& stream, const void* x, int64_t rows, int64_t width, const int32_t* live, const E4m3Operand& to);

/// Rows of groups in blocks of 128, cut at their distance from the group's first row; a group without rows has one block, of zeros.
/// Blocks of all groups one after the other, at most e4m3_row_blocks of them.
struct E4m3RowBlocks {
  int32_t* first;  // [groups + 1]: the first block of every group
  int2* rows;      // [blocks]: first row and number of rows; -1 behind the last block
  int64_t blocks;
};
constexpr int64_t e4m3_row_blocks(int64_t rows, int64_t groups) { return rows / e4m3_run + groups; }
void find_row_blocks(mimo_stream& stream, const int32_t* offsets, int64_t groups, const E4m3RowBlocks& to);

/// Columns as rows of 128 numbers, one for every block of rows.
struct E4m3Columns {
  uint8_t* values;  // [blocks, width, 128]; zeros behind a block's last row
  float* factors;   // [blocks, width], or of 128 columns at once [blocks, ceil(width / 128)]
};
/// Rows in bf16 or, with factors, in e4m3.
struct E4m3Source {
  const void* values;    // [rows, width]
  const float* factors;  // of runs and rows; or null
  int64_t factor_stride;
};
/// x turned and rounded: with a factor for every block and column, or (`square`) for 128 columns. width a multiple of 16.
void turn_rows(mimo_stream& stream, const E4m3Source& x, int64_t width, const E4m3RowBlocks& blocks, bool square,
               const E4m3Columns& to);

/// The rows of moe_permute in e4m3 and, unless they are null, in bf16. row_of_slot: -1 for slots without a row.
void permute_in_e4m3(mimo_stream& stream, const mimo_moe_permute_args& args, const int32_t* row_of_slot);

/// hs of grouped_mlp_forward, rounded to bf16 and then to e4m3 in runs of 128 columns.
void activate_in_e4m3(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args, const void* z, const E4m3Operand& hs);
/// dz, hs, hs_e4m3 and drow_probability without its part of b2 (each unless null) of grouped_mlp_backward, from dhs [rows,
/// width] in bf16; dz also in e4m3, in runs of 128 columns.
void activation_gradient_in_e4m3(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args, const void* dhs,
                                 const E4m3Operand& dz);

}  // namespace mimo::cuda
