// e4m3 operands of the grouped GEMMs and the kernels that produce them (docs/spec/moe-performance.md §1.7).
#pragma once
#include "device.h"

namespace mimo::cuda {

constexpr int64_t e4m3_run = 128;

/// Elements between the factors of consecutive runs: padded to 16 bytes for TMA.
constexpr int64_t e4m3_factor_stride(int64_t rows) { return (rows + 3) / 4 * 4; }

/// Quantised values, and factors that dequantise them (the inverse of the power of two applied).
struct E4m3Operand {
  uint8_t* values;
  float* factors;  // [runs, factor_stride]
  int64_t factor_stride;
};
/// Wraps caller-provided buffers of an operand [rows, columns].
inline E4m3Operand e4m3_operand(const void* values, const float* factors, int64_t rows) {
  return {static_cast<uint8_t*>(const_cast<void*>(values)), const_cast<float*>(factors), e4m3_factor_stride(rows)};
}

/// Quantises x [rows, width], bf16, in runs of 128 columns: values [rows, width], a factor for each run and row. Rows
/// from *live (null: rows) on are not touched; width is a multiple of 16.
void quantize_rows(mimo_stream& stream, const void* x, int64_t rows, int64_t width, const int32_t* live, const E4m3Operand& to);

/// Splits each group's rows into blocks of 128, counted from the group's first row; an empty group has one block, of
/// zeros. Blocks of all groups are consecutive, at most e4m3_row_blocks in total.
struct E4m3RowBlocks {
  int32_t* first;  // [groups + 1]: the first block of every group
  int2* rows;      // [blocks]: first row and number of rows; -1 past the last block
  int64_t blocks;
};
constexpr int64_t e4m3_row_blocks(int64_t rows, int64_t groups) { return rows / e4m3_run + groups; }
void find_row_blocks(mimo_stream& stream, const int32_t* offsets, int64_t groups, const E4m3RowBlocks& to);

/// Transposed quantised rows: each column of a block of rows is a row of 128 values.
struct E4m3Columns {
  uint8_t* values;  // [blocks, width, 128]; zeros past a block's last row
  float* factors;   // [blocks, width], or [blocks, ceil(width / 128)] for 128 x 128 blocks
};
/// Rows in bf16 or, if factors is not null, in e4m3.
struct E4m3Source {
  const void* values;    // [rows, width]
  const float* factors;  // [runs, rows], or null
  int64_t factor_stride;
};
/// Transposes and quantises x, with a factor for each block and column or (`square`) each 128 x 128 block. width is a
/// multiple of 16.
void turn_rows(mimo_stream& stream, const E4m3Source& x, int64_t width, const E4m3RowBlocks& blocks, bool square,
               const E4m3Columns& to);

/// moe_permute's rows in e4m3 and, unless the pointers are null, in bf16. row_of_slot is -1 for slots without a row.
void permute_in_e4m3(mimo_stream& stream, const mimo_moe_permute_args& args, const int32_t* row_of_slot);

/// hs of grouped_mlp_forward, rounded to bf16 and then quantised in runs of 128 columns.
void activate_in_e4m3(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args, const void* z, const E4m3Operand& hs);
/// From dhs [rows, width], bf16: dz, hs, hs_e4m3 and drow_probability (without the b2 term) of grouped_mlp_backward,
/// each unless null; and dz quantised in runs of 128 columns.
void activation_gradient_in_e4m3(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args, const void* dhs,
                                 const E4m3Operand& dz);

}  // namespace mimo::cuda
