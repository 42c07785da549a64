// SHA-256 (FIPS 180-4) of one stream, or of two interleaved streams.
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

/// Hashes `blocks` more blocks of each of `streams` (1 or 2) streams.
void sha256_update(Sha256State* const* states, const uint8_t* const* data, int streams, size_t blocks);

/// Hashes `blocks` more blocks of one stream without SHA-NI.
void sha256_update_plain(Sha256State& state, const uint8_t* data, size_t blocks);

/// Hashes the stream's last bytes (less than a block) and its total length; writes the 32-byte digest.
void sha256_end(Sha256State& state, const uint8_t* rest, size_t rest_bytes, uint64_t total_bytes, uint8_t* sum);

}  // namespace mimo
