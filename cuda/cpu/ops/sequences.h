// Maps tokens of packed sequences to their sequence.
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

/// Index of the packed sequence that contains `token`; empty sequences are skipped.
static inline int64_t sequence_of(const int32_t* cu_seqlens, int64_t sequences, int64_t token) {
  int64_t low = 0, high = sequences;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle + 1] <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Calls body(begin, end, first, last) for each piece [begin, end) of tokens that lies in one sequence [first, last).
template <class Body>
static inline void for_each_piece(const int32_t* cu_seqlens, int64_t sequences, int64_t begin, int64_t end,
                                  Body&& body) {
  for (int64_t s = sequence_of(cu_seqlens, sequences, begin); begin < end && s < sequences; ++s) {
    const int64_t first = cu_seqlens[s], last = cu_seqlens[s + 1];
    const int64_t stop = last < end ? last : end;
    if (begin < stop) body(begin, stop, first, last);
    begin = stop;
  }
}

}  // namespace mimo::MIMO_ISA
