// Exchange of rows between the GPUs of a host through peer memory: every member has a window, memory that the others
// open (CUDA IPC), and kernels read from or write to all windows. The row ranges are read on the device.
//
// Rows are staged at the rank that owns the tokens, which bounds their number: for dispatch a member copies its rows to
// its own window and the others fetch theirs; for combine the others put rows into its window and it copies them out.
// Each exchange has two moments, signalled by counters in each other's memory: "filled", when the windows hold all
// rows, and "done", when they have been read. A stream waits for its peers in a kernel of one block; the host does not
// wait. When the run fails, give_up() ends those kernels.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device.h"
#include "peer_rows_kernels.h"

namespace mimo::cuda {

/// A buffer on this GPU and on every peer, with the addresses at which this process can access them.
class PeerMemory {
 public:
  /// y [size, bytes] = every member's x, both in host memory.
  using Tell = std::function<void(const void* x, void* y, int64_t bytes)>;
  /// All members must call it, with equal `bytes`.
  PeerMemory(mimo_device& device, int32_t size, int32_t rank, int64_t bytes, const Tell& tell);
  /// No member may use the memory any more. Unless close_opened() was called first, peers may still have it open.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Whether this process can access every member's buffer.
  bool open() const { return open_; }
  char* of(int32_t member) const { return addresses_[static_cast<size_t>(member)]; }
  void close_opened();

 private:
  mimo_device& device_;
  int32_t rank_;
  bool open_ = true;
  std::vector<char*> addresses_;
};

class PeerRows {
 public:
  using Tell = PeerMemory::Tell;
  /// Null at all members if any member cannot access another's memory. `queue`: the stream passed to exchange().
  static std::unique_ptr<PeerRows> meet(mimo_device& device, int32_t size, int32_t rank, cudaStream_t queue, Tell tell);
  ~PeerRows();

  /// Ensures window capacity for an exchange. If too small, all members detect it, wait for each other's exchanges and
  /// reallocate.
  void reserve(const mimo_row_exchange& rows);
  void exchange(const mimo_row_exchange& rows, cudaStream_t queue);
  /// Ends kernels that wait for peers. May be called from any thread.
  void give_up();
  /// Returns when no member needs this one's window any more, or after some seconds.
  void finish();

 private:
  PeerRows(mimo_device& device, int32_t size, int32_t rank, cudaStream_t queue, Tell tell);
  bool counters_work();
  mimo_device& device_;
  const int32_t size_, rank_;
  const cudaStream_t queue_;
  const Tell tell_;
  std::unique_ptr<PeerMemory> counters_, window_;
  int64_t window_bytes_ = 0;
  int32_t* ended_ = nullptr;  // in host memory, polled by kernels
  uint32_t exchanges_ = 0;
  PeerTable peers_{};
};

}  // namespace mimo::cuda
