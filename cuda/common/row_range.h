// Ranges of rows that members of a group exchange, as mimo_row_exchange and mimo_expert_exchange_plan have them in memory.
#pragma once
#include <cstdint>

namespace mimo {

/// `rows` rows from `here` on of this member's tensor, and from `there` on of the other member's.
struct RowRange {
  int32_t here, there, rows;
};

}  // namespace mimo
