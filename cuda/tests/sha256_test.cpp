// SHA-256: a known sum, and one, two or no processor's instructions give the same states.
#include "sha256.h"

#include <cstring>
#include <vector>

#include "check.h"

namespace {

void known_sum() {
  // FIPS 180-4's example "abc".
  const uint8_t expected[] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d, 0xae, 0x22, 0x23,
                              0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17, 0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad};
  mimo::Sha256State state = mimo::sha256_begin();
  uint8_t sum[32];
  mimo::sha256_end(state, reinterpret_cast<const uint8_t*>("abc"), 3, 3, sum);
  CHECK(std::memcmp(sum, expected, sizeof sum) == 0);
}

bool equal(const mimo::Sha256State& a, const mimo::Sha256State& b) {
  return std::memcmp(a.words, b.words, sizeof a.words) == 0;
}

void same_states(size_t blocks) {
  std::vector<uint8_t> bytes(2 * blocks * mimo::sha256_block + 1);
  uint32_t noise = 1;
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((noise = noise * 1664525 + 1013904223) >> 24);
  // The second one is not aligned.
  const uint8_t* data[] = {bytes.data(), bytes.data() + blocks * mimo::sha256_block + 1};
  mimo::Sha256State plain[2], one[2], both[2];
  mimo::Sha256State* states[] = {&both[0], &both[1]};
  for (int s = 0; s < 2; s++) {
    plain[s] = one[s] = both[s] = mimo::sha256_begin();
    mimo::sha256_update_plain(plain[s], data[s], blocks);
    mimo::Sha256State* own[] = {&one[s]};
    mimo::sha256_update(own, data + s, 1, blocks);
  }
  mimo::sha256_update(states, data, 2, blocks);
  for (int s = 0; s < 2; s++) {
    CHECK(equal(plain[s], one[s]));
    CHECK(equal(plain[s], both[s]));
  }
}

}  // namespace

int main() {
  known_sum();
  for (const size_t blocks : {size_t{0}, size_t{1}, size_t{2}, size_t{1000}}) same_states(blocks);
  return failures;
}
