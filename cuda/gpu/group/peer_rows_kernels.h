// Kernels of peer_rows.cpp.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "mimo.h"

namespace mimo::cuda {

/// Maximum number of GPUs of a host.
constexpr int32_t most_peers = 32;

/// Moments of an exchange that members signal, each with a counter of exchanges.
enum class Moment : int32_t { filled = 0, done = 1 };

/// Addresses at which this GPU accesses every member's memory, its own included.
struct PeerTable {
  char* windows[most_peers];
  uint32_t* counters[most_peers];  // [moments, most_peers]: written by each peer
  const int32_t* ended;
  int32_t size;
  int32_t rank;
};

/// Signals to all peers, after the stream's work, that this member has reached `moment` of exchange `number`.
void tell_peers(const PeerTable& peers, Moment moment, uint32_t number, cudaStream_t stream);
/// Blocks the stream until all peers have signalled it.
void wait_for_peers(const PeerTable& peers, Moment moment, uint32_t number, cudaStream_t stream);

/// Offset of the rows beside others in a window that holds `stage_rows` rows.
constexpr int64_t beside_offset(int64_t stage_rows, int64_t row_bytes) {
  return (stage_rows * row_bytes + 255) / 256 * 256;
}
/// Copies rows of all windows into y (stage: the sender), or rows of x into the windows (stage: the receiver).
void copy_peer_rows(const PeerTable& peers, const mimo_row_exchange& rows, cudaStream_t stream);

}  // namespace mimo::cuda
