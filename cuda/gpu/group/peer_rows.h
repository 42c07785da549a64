// Rows between the GPUs of a host without messages: every member has a window, memory that the others have opened (CUDA's
// inter-process handles), and kernels read from or write to the windows of all. Which rows, they read from the device.
//
// Rows are staged where their tokens are, because there are at most so many: on the way to the experts a member copies its rows
// to its own window, and the others fetch theirs; on the way back they put rows into its window, and it copies them out. Each
// exchange has two moments, which members tell each other by counters in each other's memory: "filled", all that goes into the
// windows lies there, and "done", what was there has been taken. A stream waits for the others in a kernel of one block; the host
// does not wait. When the run fails, give_up() ends those kernels.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device.h"
#include "peer_rows_kernels.h"

namespace mimo::cuda {

/// Memory of this GPU and of every other member's, at the addresses under which this process reaches it.
class PeerMemory {
 public:
  /// y [size, bytes] = every member's x, both of the host.
  using Tell = std::function<void(const void* x, void* y, int64_t bytes)>;
  /// All members call it, with equal bytes.
  PeerMemory(mimo_device& device, int32_t size, int32_t rank, int64_t bytes, const Tell& tell);
  /// No member may use the memory any more. Without close_opened() first, other members may still have it open.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Whether this process reaches all.
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
  /// Null at all members if any member cannot reach another's memory. `queue`: the stream that exchange() is given.
  static std::unique_ptr<PeerRows> meet(mimo_device& device, int32_t size, int32_t rank, cudaStream_t queue, Tell tell);
  ~PeerRows();

  /// Room in the windows for an exchange. Where it is too small all members find so, wait for each other's exchanges and make it anew.
  void reserve(const mimo_row_exchange& rows);
  void exchange(const mimo_row_exchange& rows, cudaStream_t queue);
  /// Ends kernels that wait for others. From any thread.
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
  int32_t* ended_ = nullptr;  // of the host, read by kernels
  uint32_t exchanges_ = 0;
  PeerTable peers_{};
};

}  // namespace mimo::cuda
