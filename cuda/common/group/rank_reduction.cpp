#include "rank_reduction.h"

#include "processor.h"

namespace mimo {

void reduce_ranks(int32_t dtype, int32_t reduction, void* to, const void* const* parts, int32_t ranks,
                  int64_t elements) {
  static const bool wide = processor_has_avx512();
  const auto kernel = wide ? avx512::reduce_ranks : avx2::reduce_ranks;
  kernel(dtype, reduction, to, parts, ranks, elements);
}

}  // namespace mimo
