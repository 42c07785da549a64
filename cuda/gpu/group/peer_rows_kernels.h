// Kernels of peer_rows.cpp.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "mimo.h"

namespace mimo::cuda {

/// GPUs of a host.
constexpr int32_t most_peers = 32;

/// Moments of an exchange that members tell each other, each by a counter of exchanges.
enum class Moment : int32_t { filled = 0, done = 1 };

/// Addresses under which this GPU reaches the others', itself among them.
struct PeerTable {
  char* windows[most_peers];
  uint32_t* counters[most_peers];  // [moments, most_peers]: those that a member is told by each
  const int32_t* ended;
  int32_t size;
  int32_t rank;
};

/// Tells all others, behind what the stream holds, that this member's `moment` of exchange `number` is there.
void tell_peers(const PeerTable& peers, Moment moment, uint32_t number, cudaStream_t stream);
/// The stream goes on when all others have told so.
void wait_for_peers(const PeerTable& peers, Moment moment, uint32_t number, cudaStream_t stream);

/// Where the rows beside others begin in a window of so many rows.
constexpr int64_t beside_offset(int64_t stage_rows, int64_t row_bytes) {
  return (stage_rows * row_bytes + 255) / 256 * 256;
}
/// Rows of the windows of all into y (stage: the sender), or rows of x into them (the receiver).
void copy_peer_rows(const PeerTable& peers, const mimo_row_exchange& rows, cudaStream_t stream);

}  // namespace mimo::cuda
