// From sums by columns to the gradients of masks (docs/spec/elastic.md §9).
#pragma once
#include "column_sums.cuh"

namespace mimo::cuda {

/// Rows of a block that sums rows by columns.
constexpr int64_t mask_rows_per_block = 128;

/// Sums of rows by columns: partial[p][c] of the rows from p * rows_per_partial on. Partials of rows that are not live are not read.
struct PartialSums {
  const float* partial;
  int64_t rows, rows_per_partial, width;
  const int32_t* row_count;  // or null
};

/// With S_c = Σ_p partial[p][c], in a fixed order: dfactors[c] += scale S_c, dscale[c] += factors[c] S_c. Null factors and a
/// null scale are 1; a null gradient is left out.
void add_mask_gradients(mimo_stream& stream, const PartialSums& sums, const float* factors, const float* scale,
                        float* dfactors, float* dscale);

}  // namespace mimo::cuda
