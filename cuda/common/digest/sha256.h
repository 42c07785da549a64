// SHA-256 (FIPS 180-4) of one stream, or of two side by side.
#pragma once
#include <cstddef>
#include <cstdint>

namespace mimo {

constexpr size_t sha256_block = 64;

/// State of a stream after whole blocks.
struct Sha256State {
  uint32_t words[8];
};

Sha256State sha256_begin();

/// `blocks` more blocks of `streams` (1 or 2) streams, each from its own memory.
void sha256_update(Sha256State* const* states, const uint8_t* const* data, int streams, size_t blocks);

/// `blocks` more blocks of one stream, without the processor's instructions for SHA-256.
void sha256_update_plain(Sha256State& state, const uint8_t* data, size_t blocks);

/// The stream's last bytes (fewer than a block) and the length of the whole; writes the 32 bytes of the sum.
void sha256_end(Sha256State& state, const uint8_t* rest, size_t rest_bytes, uint64_t total_bytes, uint8_t* sum);

}  // namespace mimo
