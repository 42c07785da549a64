// Non-temporal stores for results larger than the caches. A plain store first reads the line that it overwrites: a
// third more memory traffic for a norm.
#pragma once
#include <immintrin.h>

#include "kernel.h"

namespace mimo::MIMO_ISA {

/// Whether a result of this size bypasses the caches: from about the size of the last-level cache on.
static inline bool is_streamed(int64_t elements, int64_t element_bytes) {
  return elements * element_bytes >= int64_t{32} << 20;
}

/// Copies elements with non-temporal stores; partial lines at either end use plain stores.
template <class T>
static inline void copy_past_caches(T* to, const T* from, int64_t count) {
  constexpr int64_t lanes = 32 / static_cast<int64_t>(sizeof(T));
  int64_t i = 0;
  for (; i < count && (reinterpret_cast<uintptr_t>(to + i) & 31) != 0; ++i) to[i] = from[i];
  for (; i + lanes <= count; i += lanes) {
    const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), part);
  }
  for (; i < count; ++i) to[i] = from[i];
}

/// Calls write(to, begin, end) for pieces of a row of `width` elements; `to` is the destination of element `begin`.
/// `streamed`: the pieces are computed in an L1 buffer and written past the caches; call finish_streaming before
/// another thread reads them.
template <class T, class Write>
static inline void write_row(bool streamed, T* row, int64_t width, Write&& write) {
  if (!streamed) {
    write(row, int64_t{0}, width);
    return;
  }
  constexpr int64_t piece = 512;
  alignas(64) T made[piece];
  for (int64_t begin = 0; begin < width; begin += piece) {
    const int64_t end = begin + piece < width ? begin + piece : width;
    write(made, begin, end);
    copy_past_caches(row + begin, made, end - begin);
  }
}

/// Orders non-temporal stores before later stores.
static inline void finish_streaming(bool streamed) {
  if (streamed) _mm_sfence();
}

}  // namespace mimo::MIMO_ISA
