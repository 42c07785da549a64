// The cases of operations_check, one function an operation, with small sizes (odd ones too) and sizes of real models.
#pragma once
#include "harness.h"

namespace check {

using Cases = std::vector<Case>;

/// Packed sequences of these lengths.
inline std::vector<int32_t> cumulative(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> sums{0};
  for (const int32_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

void add_products(Cases& cases, bool large);
void add_norms(Cases& cases, bool large);
void add_elementwise(Cases& cases, bool large);
void add_loss(Cases& cases, bool large);
void add_experts(Cases& cases, bool large);
void add_grouped_mlp(Cases& cases, bool large);
void add_attention(Cases& cases, bool large);
void add_mamba(Cases& cases, bool large);
void add_elastic(Cases& cases, bool large);

Cases cases(bool large);

}  // namespace check
