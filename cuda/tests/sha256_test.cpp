// SHA-256 against a known digest and between its implementations; HMAC against known tags.
#include "sha256.h"

#include <cstring>
#include <vector>

#include "check.h"
#include "hmac.h"

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

void known_tags() {
  // RFC 4231, cases 1 and 2; their shorter keys are equal to zero-padded ones.
  struct Case {
    uint8_t key[mimo::hmac_key_bytes];
    const char* text;
    uint8_t tag[mimo::hmac_tag_bytes];
  };
  const Case cases[] = {
      {{0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b, 0x0b},
       "Hi There",
       {0xb0, 0x34, 0x4c, 0x61, 0xd8, 0xdb, 0x38, 0x53, 0x5c, 0xa8, 0xaf, 0xce, 0xaf, 0x0b, 0xf1, 0x2b,
        0x88, 0x1d, 0xc2, 0x00, 0xc9, 0x83, 0x3d, 0xa7, 0x26, 0xe9, 0x37, 0x6c, 0x2e, 0x32, 0xcf, 0xf7}},
      {{'J', 'e', 'f', 'e'},
       "what do ya want for nothing?",
       {0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24, 0x26, 0x08, 0x95, 0x75, 0xc7,
        0x5a, 0x00, 0x3f, 0x08, 0x9d, 0x27, 0x39, 0x83, 0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43}},
  };
  for (const Case& one : cases) {
    mimo::Hmac whole(one.key), parts(one.key);
    uint8_t tag[mimo::hmac_tag_bytes];
    whole.add(one.text, std::strlen(one.text));
    whole.finish(tag);
    CHECK(mimo::equal_in_constant_time(tag, one.tag, sizeof tag));
    for (const char* at = one.text; *at != 0; ++at) parts.add(at, 1);
    parts.finish(tag);
    CHECK(std::memcmp(tag, one.tag, sizeof tag) == 0);
    tag[31] ^= 1;
    CHECK(!mimo::equal_in_constant_time(tag, one.tag, sizeof tag));
  }
  // Longer than a block, in uneven parts.
  const std::vector<uint8_t> bytes(1000, 7);
  mimo::Hmac whole(cases[0].key), parts(cases[0].key);
  uint8_t tags[2][mimo::hmac_tag_bytes];
  whole.add(bytes.data(), bytes.size());
  whole.finish(tags[0]);
  for (const size_t part : {1, 63, 64, 65, 200, 607}) parts.add(bytes.data(), part);
  parts.finish(tags[1]);
  CHECK(std::memcmp(tags[0], tags[1], sizeof tags[0]) == 0);
}

bool equal(const mimo::Sha256State& a, const mimo::Sha256State& b) {
  return std::memcmp(a.words, b.words, sizeof a.words) == 0;
}

void same_states(size_t blocks) {
  std::vector<uint8_t> bytes(2 * blocks * mimo::sha256_block + 1);
  uint32_t noise = 1;
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((noise = noise * 1664525 + 1013904223) >> 24);
  // The second stream is not aligned.
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
  known_tags();
  for (const size_t blocks : {size_t{0}, size_t{1}, size_t{2}, size_t{1000}}) same_states(blocks);
  return failures;
}
