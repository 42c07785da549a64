// HMAC-SHA256 (RFC 2104) with keys of 32 bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sha256.h"

namespace mimo {

constexpr size_t hmac_key_bytes = 32;
constexpr size_t hmac_tag_bytes = 32;

/// Computes the tag of a message given in parts.
class Hmac {
 public:
  /// `key`: 32 bytes.
  explicit Hmac(const uint8_t* key);
  void add(const void* part, size_t bytes);
  /// Writes the 32-byte tag; no parts may be added afterwards.
  void finish(uint8_t* tag);

 private:
  uint8_t key_[hmac_key_bytes];
  Sha256State state_;
  uint8_t rest_[sha256_block];
  size_t rest_bytes_ = 0;
  uint64_t bytes_ = 0;
};

/// Compares two byte strings in time that does not depend on where they differ.
bool equal_in_constant_time(const uint8_t* a, const uint8_t* b, size_t bytes);

}  // namespace mimo
