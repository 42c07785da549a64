// SHA-256 with SHA-NI instructions if available. With two streams their rounds are interleaved, because each round
// waits for the previous round of its own stream.
#include "sha256.h"

#include <cpuid.h>
#include <immintrin.h>

#include <cstring>

namespace mimo {
namespace {

alignas(16) constexpr uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t x, int by) { return (x >> by) | (x << (32 - by)); }

uint32_t load_big_endian(const uint8_t* at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return __builtin_bswap32(word);
}

/// Four rounds an iteration; x holds words a, b, e, f of a stream and y words c, d, g, h, the layout of the
/// instructions.
template <int streams>
__attribute__((target("sha,sse4.1,ssse3"))) void update_sha_ni(Sha256State* const* states, const uint8_t* const* data,
                                                               size_t blocks) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i x[streams], y[streams];
  for (int s = 0; s < streams; s++) {
    const uint32_t* v = states[s]->words;
    x[s] = _mm_set_epi32(static_cast<int>(v[0]), static_cast<int>(v[1]), static_cast<int>(v[4]), static_cast<int>(v[5]));
    y[s] = _mm_set_epi32(static_cast<int>(v[2]), static_cast<int>(v[3]), static_cast<int>(v[6]), static_cast<int>(v[7]));
  }
  for (size_t block = 0; block < blocks; block++) {
    __m128i w[streams][4], x0[streams], y0[streams];
    for (int s = 0; s < streams; s++) {
      x0[s] = x[s];
      y0[s] = y[s];
      for (int i = 0; i < 4; i++) {
        const void* at = data[s] + block * sha256_block + static_cast<size_t>(16 * i);
        w[s][i] = _mm_shuffle_epi8(_mm_loadu_si128(static_cast<const __m128i*>(at)), big_endian);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(constants + 4 * i));
#pragma GCC unroll 2
      for (int s = 0; s < streams; s++) {
        const __m128i sum = _mm_add_epi32(w[s][i & 3], k);
        y[s] = _mm_sha256rnds2_epu32(y[s], x[s], sum);
        if (i < 12) {
          const __m128i seven = _mm_alignr_epi8(w[s][(i + 3) & 3], w[s][(i + 2) & 3], 4);
          const __m128i first = _mm_add_epi32(_mm_sha256msg1_epu32(w[s][i & 3], w[s][(i + 1) & 3]), seven);
          w[s][i & 3] = _mm_sha256msg2_epu32(first, w[s][(i + 3) & 3]);
        }
        x[s] = _mm_sha256rnds2_epu32(x[s], y[s], _mm_shuffle_epi32(sum, 0x0e));
      }
    }
    for (int s = 0; s < streams; s++) {
      x[s] = _mm_add_epi32(x[s], x0[s]);
      y[s] = _mm_add_epi32(y[s], y0[s]);
    }
  }
  for (int s = 0; s < streams; s++) {
    uint32_t v[8];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(v), x[s]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(v + 4), y[s]);
    const uint32_t words[8] = {v[3], v[2], v[7], v[6], v[1], v[0], v[5], v[4]};
    std::memcpy(states[s]->words, words, sizeof words);
  }
}

bool has_sha_ni() {
  static const bool has = [] {
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & (1u << 29)) != 0;
  }();
  return has;
}

}  // namespace

Sha256State sha256_begin() {
  return {{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void sha256_update_plain(Sha256State& state, const uint8_t* data, size_t blocks) {
  for (; blocks > 0; blocks--, data += sha256_block) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++) w[i] = load_big_endian(data + 4 * i);
    for (int i = 16; i < 64; i++) {
      const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    std::memcpy(v, state.words, sizeof v);
    auto& [a, b, c, d, e, f, g, h] = v;
    for (int i = 0; i < 64; i++) {
      const uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + constants[i] + w[i];
      const uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    for (int i = 0; i < 8; i++) state.words[i] += v[i];
  }
}

void sha256_update(Sha256State* const* states, const uint8_t* const* data, int streams, size_t blocks) {
  if (!has_sha_ni()) {
    for (int s = 0; s < streams; s++) sha256_update_plain(*states[s], data[s], blocks);
  } else if (streams == 2) {
    update_sha_ni<2>(states, data, blocks);
  } else {
    update_sha_ni<1>(states, data, blocks);
  }
}

void sha256_end(Sha256State& state, const uint8_t* rest, size_t rest_bytes, uint64_t total_bytes, uint8_t* sum) {
  uint8_t last[2 * sha256_block] = {};
  std::memcpy(last, rest, rest_bytes);
  last[rest_bytes] = 0x80;
  const size_t bytes = rest_bytes + 9 <= sha256_block ? sha256_block : 2 * sha256_block;
  const uint64_t bits = __builtin_bswap64(total_bytes * 8);
  std::memcpy(last + bytes - 8, &bits, 8);
  Sha256State* states[] = {&state};
  const uint8_t* data[] = {last};
  sha256_update(states, data, 1, bytes / sha256_block);
  for (int i = 0; i < 8; i++) {
    const uint32_t word = __builtin_bswap32(state.words[i]);
    std::memcpy(sum + 4 * i, &word, 4);
  }
}

}  // namespace mimo
