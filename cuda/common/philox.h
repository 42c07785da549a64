// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011), a counter-based generator: a value depends only on the seed and the
// element's index, never on layout or order.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define MIMO_HOST_DEVICE __host__ __device__
#else
#define MIMO_HOST_DEVICE
#endif

namespace mimo {

struct PhiloxWords {
  uint32_t word[4];
};

/// One round, r of 10. Functions are `static`: kernels are compiled for several processors, and the linker must not
/// merge their copies.
MIMO_HOST_DEVICE static inline void philox_round(uint32_t r, uint32_t k0, uint32_t k1, uint32_t& c0, uint32_t& c1,
                                                 uint32_t& c2, uint32_t& c3) {
  const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
  const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
  c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ (k0 + r * 0x9E3779B9u);
  c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ (k1 + r * 0xBB67AE85u);
  c1 = static_cast<uint32_t>(p1);
  c3 = static_cast<uint32_t>(p0);
}

/// Four random words of (seed, counter). The upper half of the 128-bit counter is 0 in all our uses. Unrolled by hand,
/// because compilers vectorise only innermost loops.
MIMO_HOST_DEVICE static inline PhiloxWords philox(uint64_t seed, uint64_t counter, uint64_t counter_high = 0) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_high), c3 = static_cast<uint32_t>(counter_high >> 32);
  const uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  philox_round(0, k0, k1, c0, c1, c2, c3);
  philox_round(1, k0, k1, c0, c1, c2, c3);
  philox_round(2, k0, k1, c0, c1, c2, c3);
  philox_round(3, k0, k1, c0, c1, c2, c3);
  philox_round(4, k0, k1, c0, c1, c2, c3);
  philox_round(5, k0, k1, c0, c1, c2, c3);
  philox_round(6, k0, k1, c0, c1, c2, c3);
  philox_round(7, k0, k1, c0, c1, c2, c3);
  philox_round(8, k0, k1, c0, c1, c2, c3);
  philox_round(9, k0, k1, c0, c1, c2, c3);
  return PhiloxWords{{c0, c1, c2, c3}};
}

/// Uniform in [0, 1) with 24 bits.
MIMO_HOST_DEVICE static inline float philox_uniform(uint32_t word) { return static_cast<float>(word >> 8) * 5.9604644775390625e-8f; }

}  // namespace mimo
