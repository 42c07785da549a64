// Reduces the parts of several ranks in rank order.
#pragma once
#include <cstdint>

namespace mimo {

/// to[i] = parts[0][i] + parts[1][i] + … (or the maximum; NaN propagates). f32, f64 and i32 are summed in their own
/// type, bf16 in f32 with one final rounding. `to` may alias one of the parts.
void reduce_ranks(int32_t dtype, int32_t reduction, void* to, const void* const* parts, int32_t ranks,
                  int64_t elements);

namespace avx2 {
void reduce_ranks(int32_t dtype, int32_t reduction, void* to, const void* const* parts, int32_t ranks,
                  int64_t elements);
}
namespace avx512 {
void reduce_ranks(int32_t dtype, int32_t reduction, void* to, const void* const* parts, int32_t ranks,
                  int64_t elements);
}

}  // namespace mimo
