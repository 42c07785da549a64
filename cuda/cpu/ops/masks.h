// Mask factors of columns and the column sums of their gradients (docs/spec/elastic.md §9).
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

/// The factor of a column: scale * factors[c]. Either may be null, which counts as 1.
class MaskFactors {
 public:
  MaskFactors(mimo_stream* stream, const float* factors, const float* scale, int64_t width)
      : factors_(factors),
        scale_(scale == nullptr ? 1.0f : *scale),
        width_(width),
        workspace_(stream, width * static_cast<int64_t>(sizeof(float))) {
    float* const product = workspace_.as<float>();
    for (int64_t c = 0; c < width; ++c) product[c] = factors == nullptr ? scale_ : scale_ * factors[c];
  }

  const float* product() const { return workspace_.as<float>(); }
  /// Without the scale; null counts as 1.
  const float* factors() const { return factors_; }
  float scale() const { return scale_; }

  /// dfactors[c] += scale sums[c], dscale[c] += factors[c] sums[c]; either may be null.
  void add_gradients(const float* sums, float* dfactors, float* dscale) const {
    for (int64_t c = 0; c < width_; ++c) {
      if (dfactors != nullptr) dfactors[c] += scale_ * sums[c];
      if (dscale != nullptr) dscale[c] += factors_ == nullptr ? sums[c] : factors_[c] * sums[c];
    }
  }

 private:
  const float* factors_;
  float scale_;
  int64_t width_;
  Workspace workspace_;
};

/// Column sums over rows: one partial sum for each rows_per_partial rows, added in order.
class ColumnSums {
 public:
  ColumnSums(mimo_stream* stream, int64_t rows, int64_t width, bool wanted)
      : stream_(stream),
        width_(width),
        partials_(wanted ? (rows + rows_per_partial - 1) / rows_per_partial : 0),
        workspace_(stream, (wanted ? 1 + partials_ : 0) * width * static_cast<int64_t>(sizeof(float))) {}

  /// Clears and returns the partial sums of the rows from `begin` on; null if no sums are wanted.
  float* cleared_partial(int64_t begin) {
    if (partials_ == 0) return nullptr;
    float* const own = partial(begin);
    std::memset(own, 0, static_cast<size_t>(width_) * sizeof(float));
    return own;
  }

  /// The partial sums that include `row`.
  float* partial(int64_t row) { return workspace_.as<float>() + (1 + row / rows_per_partial) * width_; }

  const float* total() {
    float* const total = workspace_.as<float>();
    std::memset(total, 0, static_cast<size_t>(width_) * sizeof(float));
    add_partials(*stream_, total + width_, partials_, width_, total);
    return total;
  }

 private:
  mimo_stream* stream_;
  int64_t width_, partials_;
  Workspace workspace_;
};

}  // namespace mimo::MIMO_ISA
