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
struct Name {
  int32_t rank, pid;
  char host[MIMO_HOST_BYTES], module[MIMO_MODULE_BYTES], coordinates[MIMO_COORDINATES_BYTES];
};
struct Failure {
  int32_t rank;
  char reason[MIMO_SENTENCE_BYTES];
};
struct Whereabouts {
  int32_t rank, phase;
  int64_t step, calls, waiting_call;
  char error[MIMO_SENTENCE_BYTES];
  mimo_call_record records[told_calls];
};

struct Wish {
  uint64_t key;
};

// X(word, body, whether it belongs to the proof, which carries no tags)
#define MIMO_RELAY_WORDS(X)                                                       \
  X(greeting, Nonce, true)       /* by the parent */                              \
  X(hello, Hello, true)          /* by the child, which proves itself first */    \
  X(welcome, Proof, true)        /* by the parent: the child is taken in */       \
  X(refusal, Nothing, true)      /* by the parent: the child's proof is wrong */  \
  X(outlook, Outlook, false)     /* of the child and all below; by a parent of all */ \
  X(name, Name, false)           /* of a rank */                                  \
  X(wish, Wish, false)           /* by a child: for a posting */                  \
  X(posting, Posting, false)     /* to the centre, and to those that wish for it */ \
  X(failure, Failure, false)     /* the first wins */                             \
  X(region, Whereabouts, false)  /* by a child: of a rank when the run had failed */ \
  X(begun, BegunRun, false)      /* when the run had failed; by a parent of all ranks */ \
  X(gathered, Nothing, false)    /* that was all that had begun */                \
  X(noted, Nothing, false)       /* by a child: these were its ranks' last notes */ \
  X(bye, Nothing, false)         /* by a child: all ranks there and below have finished */

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
