// Philox 4x32-10 against the known answers of Random123 (kat_vectors).
#include "philox.h"

#include "check.h"

namespace {

void known_answer(uint64_t seed, uint64_t counter, uint64_t counter_high, uint32_t w0, uint32_t w1, uint32_t w2,
                  uint32_t w3) {
  const mimo::PhiloxWords words = mimo::philox(seed, counter, counter_high);
  CHECK(words.word[0] == w0);
  CHECK(words.word[1] == w1);
  CHECK(words.word[2] == w2);
  CHECK(words.word[3] == w3);
}

}  // namespace

int main() {
  known_answer(0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  known_answer(0xffffffffffffffff, 0xffffffffffffffff, 0xffffffffffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6,
               0x6d5451fd);
  // Counter and key are the digits of pi.
  known_answer(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
               0x24126ea1);
  CHECK(mimo::philox_uniform(0) == 0.0f);
  CHECK(mimo::philox_uniform(0xffffffff) == 1.0f - 0x1p-24f);
  return failures == 0 ? 0 : 1;
}
