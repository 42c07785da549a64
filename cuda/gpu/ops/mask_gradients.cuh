// Gradients of mask factors from column sums (docs/spec/elastic.md §9).
#pragma once
#include "column_sums.cuh"

namespace mimo::cuda {

/// Rows that a block sums.
constexpr int64_t mask_rows_per_block = 128;

/// Column sums: partial[p][c] over the rows from p * rows_per_partial on. Partials of rows past the live ones are not
/// read.
struct PartialSums {
  const float* partial;
  int64_t rows, rows_per_partial, width;
  const int32_t* row_count;  // or null
};

/// With S_c = Σ_p partial[p][c] in a fixed order: dfactors[c] += scale S_c and dscale[c] += factors[c] S_c. Null
/// factors and scale count as 1; a null gradient is skipped.
void add_mask_gradients(mimo_stream& stream, const PartialSums& sums, const float* factors, const float* scale,
                        float* dfactors, float* dscale);

}  // namespace mimo::cuda
