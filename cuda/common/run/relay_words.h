// The messages between relays: every word once, with the struct that is its body.
#pragma once
#include <cstddef>
#include <cstdint>

#include "hmac.h"
#include "run.h"

namespace mimo {

struct Nothing {};
struct Nonce {
  uint8_t bytes[32];
};
struct Proof {
  uint8_t bytes[hmac_tag_bytes];
};
struct Hello {
  int32_t host_index;
  Nonce nonce;
  Proof proof;
};
struct Beat {
  int32_t rank, phase;
  int64_t heartbeat, progress, progress_age, step, calls, waiting_call;
};
struct Name {
  int32_t rank, pid;
  char host[MIMO_HOST_BYTES], module[MIMO_MODULE_BYTES], coordinates[MIMO_COORDINATES_BYTES];
};
struct Failure {
  int32_t rank;
  char reason[MIMO_SENTENCE_BYTES];
};
/// Number of calls of a rank that are sent: the latest of each group, and those that are not done.
constexpr int32_t told_calls = 24;
struct Whereabouts {
  int32_t rank, phase, count;
  int64_t step, calls, waiting_call;
  char error[MIMO_SENTENCE_BYTES];
  mimo_call_record records[told_calls];
};

// X(word, body, whether it belongs to the proof, which carries no tags)
#define MIMO_RELAY_WORDS(X)                                                        \
  X(greeting, Nonce, true)       /* by the centre */                               \
  X(hello, Hello, true)          /* by the other, which proves itself first */     \
  X(welcome, Proof, true)        /* by the centre: the other is taken in */        \
  X(refusal, Nothing, true)      /* by the centre: the other's proof is wrong */   \
  X(beat, Beat, false)           /* of a rank of the sender's host */              \
  X(name, Name, false)           /* of a rank */                                   \
  X(posting, Posting, false)                                                       \
  X(failure, Failure, false)     /* the first wins */                              \
  X(region, Whereabouts, false)  /* of a rank when the run had failed */           \
  X(gathered, Nothing, false)    /* by the centre: it has sent all whereabouts */  \
  X(noted, Nothing, false)       /* by the others: these were their ranks' last */ \
  X(bye, Nothing, false)         /* all ranks of the sender's host have finished */

enum class Word : uint32_t {
#define MIMO_WORD(word, body, proving) word,
  MIMO_RELAY_WORDS(MIMO_WORD)
#undef MIMO_WORD
};

template <class Body>
constexpr size_t body_bytes = sizeof(Body);
template <>
inline constexpr size_t body_bytes<Nothing> = 0;

/// Name and size of a word's message.
struct WordShape {
  const char* name;
  size_t bytes;
  bool proving;
};
constexpr WordShape word_shapes[] = {
#define MIMO_WORD(word, body, proving) {#word, body_bytes<body>, proving},
    MIMO_RELAY_WORDS(MIMO_WORD)
#undef MIMO_WORD
};
constexpr size_t word_count = sizeof(word_shapes) / sizeof(word_shapes[0]);

/// The longest body of the words that belong to the proof, or of the others.
constexpr size_t longest_body(bool proving) {
  size_t longest = 0;
  for (const WordShape& shape : word_shapes) {
    if (shape.proving == proving && shape.bytes > longest) longest = shape.bytes;
  }
  return longest;
}

/// Makes every string of a body that came from outside end inside its field.
void terminate(Word word, void* body);

}  // namespace mimo
