#include "hmac.h"

#include <algorithm>
#include <cstring>

namespace mimo {
namespace {

/// Hash state after the key's block XORed with `pad`.
Sha256State begin_with_key(const uint8_t* key, uint8_t pad) {
  uint8_t block[sha256_block];
  for (size_t i = 0; i < sha256_block; ++i) block[i] = static_cast<uint8_t>((i < hmac_key_bytes ? key[i] : 0) ^ pad);
  Sha256State state = sha256_begin();
  Sha256State* states[] = {&state};
  const uint8_t* blocks[] = {block};
  sha256_update(states, blocks, 1, 1);
  return state;
}

}  // namespace

Hmac::Hmac(const uint8_t* key) : state_(begin_with_key(key, 0x36)), bytes_(sha256_block) {
  std::memcpy(key_, key, sizeof(key_));
}

void Hmac::add(const void* part, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(part);
  bytes_ += bytes;
  while (bytes > 0) {
    const size_t taken = std::min(bytes, sha256_block - rest_bytes_);
    std::memcpy(rest_ + rest_bytes_, from, taken);
    rest_bytes_ += taken;
    from += taken;
    bytes -= taken;
    if (rest_bytes_ < sha256_block) return;
    Sha256State* states[] = {&state_};
    const uint8_t* blocks[] = {rest_};
    sha256_update(states, blocks, 1, 1);
    rest_bytes_ = 0;
  }
}

void Hmac::finish(uint8_t* tag) {
  uint8_t inner[hmac_tag_bytes];
  sha256_end(state_, rest_, rest_bytes_, bytes_, inner);
  Sha256State outer = begin_with_key(key_, 0x5c);
  sha256_end(outer, inner, sizeof(inner), sha256_block + sizeof(inner), tag);
}

bool equal_in_constant_time(const uint8_t* a, const uint8_t* b, size_t bytes) {
  uint8_t difference = 0;
  for (size_t i = 0; i < bytes; ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace mimo
