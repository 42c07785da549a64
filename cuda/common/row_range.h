// Row ranges that members of a group exchange: the memory layout of mimo_row_exchange and mimo_expert_exchange_plan.
#pragma once
#include <cstdint>

namespace mimo {

/// `rows` rows from `here` on in this member's tensor and from `there` on in the other member's.
struct RowRange {
  int32_t here, there, rows;
};

}  // namespace mimo
