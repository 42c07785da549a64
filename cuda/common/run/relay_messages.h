// The messages between relays: each type with the struct of its body.
#pragma once
#include <cstddef>
#include <cstdint>

#include "hmac.h"
#include "run.h"

namespace mimo {

struct EmptyBody {};
struct Nonce {
  uint8_t bytes[32];
};
struct Proof {
  uint8_t bytes[hmac_tag_bytes];
};
struct Response {
  int32_t host_index;
  Nonce nonce;
  Proof proof;
};
struct RankIdentity {
  int32_t rank, pid;
  char host[MIMO_HOST_BYTES], module[MIMO_MODULE_BYTES], coordinates[MIMO_COORDINATES_BYTES];
};
struct Failure {
  int32_t rank;
  char reason[MIMO_SENTENCE_BYTES];
};
/// State of a rank after the run has failed, with the calls that a diagnosis needs.
struct RankState {
  int32_t rank, phase;
  int64_t step, calls, waiting_call;
  char error[MIMO_SENTENCE_BYTES];
  mimo_call_record records[reported_calls];
};
struct PostingRequest {
  uint64_t key;
};

// X(type, body, whether it belongs to the handshake, whose messages carry no tags)
#define MIMO_RELAY_MESSAGES(X)                                                            \
  X(challenge, Nonce, true)         /* to the child: the parent's nonce */                \
  X(response, Response, true)       /* to the parent: the child's nonce and proof */      \
  X(accepted, Proof, true)          /* to the child: the parent's proof */                \
  X(refused, EmptyBody, true)       /* to the child: its proof is wrong */                \
  X(progress, ProgressSummary, false) /* up: of the host and all below; down: of the run */ \
  X(identity, RankIdentity, false)  /* of a rank that has joined */                       \
  X(posting_request, PostingRequest, false) /* up */                                      \
  X(posting, Posting, false)        /* up to the root, and down to hosts that requested it */ \
  X(failure, Failure, false)        /* up and down; the first one counts */               \
  X(rank_state, RankState, false)   /* up, after a failure */                             \
  X(begun_range, BegunRange, false) /* after a failure; up: of hosts below; down: of the run */ \
  X(begun_end, EmptyBody, false)    /* the last begun_range has been sent */              \
  X(states_end, EmptyBody, false)   /* up: the last rank_state has been sent */           \
  X(finished, EmptyBody, false)     /* up: all ranks of the host and of hosts below have finished */

enum class MessageType : uint32_t {
#define MIMO_MESSAGE(type, body, handshake) type,
  MIMO_RELAY_MESSAGES(MIMO_MESSAGE)
#undef MIMO_MESSAGE
};

template <class Body>
constexpr size_t body_bytes = sizeof(Body);
template <>
inline constexpr size_t body_bytes<EmptyBody> = 0;

struct MessageFormat {
  const char* name;
  size_t body_bytes;
  bool handshake;
};
/// Indexed by MessageType.
constexpr MessageFormat message_formats[] = {
#define MIMO_MESSAGE(type, body, handshake) {#type, body_bytes<body>, handshake},
    MIMO_RELAY_MESSAGES(MIMO_MESSAGE)
#undef MIMO_MESSAGE
};
constexpr size_t message_types = sizeof(message_formats) / sizeof(message_formats[0]);

/// Bytes of the longest body of the handshake's messages, or of the others.
constexpr size_t longest_body(bool handshake) {
  size_t longest = 0;
  for (const MessageFormat& format : message_formats) {
    if (format.handshake == handshake && format.body_bytes > longest) longest = format.body_bytes;
  }
  return longest;
}

/// Ends every string of a received body inside its field.
void terminate_strings(MessageType type, void* body);

}  // namespace mimo
