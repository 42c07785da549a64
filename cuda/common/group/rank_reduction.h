// Reduces the parts of several ranks, in their order.
#pragma once
#include <cstdint>

namespace mimo {

/// to[i] = parts[0][i] + parts[1][i] + ... (or their maximum; NaN wins). f32, f64 and i32 in their own type, bf16 in f32
/// with one rounding at the end. `to` may be one of the parts.
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
