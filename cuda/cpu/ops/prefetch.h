// Software prefetch for rows of a strided window: they are pages apart, beyond the hardware prefetcher.
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

/// Prefetches `count` elements. The address need not be valid.
template <class T>
static inline void prefetch(const T* row, int64_t count) {
  constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < count; i += line) __builtin_prefetch(row + i);
}

}  // namespace mimo::MIMO_ISA
