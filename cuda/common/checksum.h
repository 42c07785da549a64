// What mimo_checksum adds up.
#pragma once
#include "philox.h"

namespace mimo {

/// SplitMix64's mixing (Steele, Lea, Flood 2014) of a word and its place: one to one in the word.
MIMO_HOST_DEVICE static inline uint64_t mixed(int64_t place, uint32_t word) {
  uint64_t z = static_cast<uint64_t>(place) * 0x9E3779B97F4A7C15u + word;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace mimo
