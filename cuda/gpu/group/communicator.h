// NCCL communicators: NCCL is loaded at run time and used in non-blocking mode, so that waiting for absent ranks ends
// when the run fails.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <functional>

#include "run.h"

namespace mimo::cuda {

/// The NCCL functions in use.
struct NcclFunctions;
const NcclFunctions& nccl();

struct NcclFunctions {
  NcclFunctions();
  decltype(&::ncclGetUniqueId) GetUniqueId;
  decltype(&::ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&::ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&::ncclCommFinalize) CommFinalize;
  decltype(&::ncclCommDestroy) CommDestroy;
  decltype(&::ncclCommAbort) CommAbort;
  decltype(&::ncclGetErrorString) GetErrorString;
  decltype(&::ncclGetLastError) GetLastError;
  decltype(&::ncclGroupStart) GroupStart;
  decltype(&::ncclGroupEnd) GroupEnd;
  decltype(&::ncclAllReduce) AllReduce;
  decltype(&::ncclReduceScatter) ReduceScatter;
  decltype(&::ncclAllGather) AllGather;
  decltype(&::ncclBroadcast) Broadcast;
  decltype(&::ncclSend) Send;
  decltype(&::ncclRecv) Recv;
};

ncclUniqueId new_unique_id();

/// Takes some tenths of a second; may be called from any thread.
void abort_communicator(ncclComm_t handle);

/// Device memory that a new communicator may need: channels of 4 to 8 MiB for every peer on a host, and what CUDA adds.
constexpr size_t communicator_bytes = size_t{1} << 30;

/// A communicator and the stream on which its operations are queued.
class Communicator {
 public:
  /// Returns when all `size` members have called it. `channels` 0 leaves the number to NCCL.
  Communicator(const Run& run, const ncclUniqueId& id, int32_t size, int32_t rank, int32_t channels);
  /// Aborts a communicator that is not ready yet.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  cudaStream_t stream() const { return stream_; }
  /// Queues the NCCL calls that `body` makes, as one group.
  void queue(const char* what, const std::function<ncclResult_t(ncclComm_t, cudaStream_t)>& body);
  /// Closes the queue. The queued calls end, wherever they wait, once abort_communicator() is called with the returned
  /// handle. Returns null when no communicator is open.
  ncclComm_t give_up();
  /// Finalises in two steps, because members may get here in different orders: begin_finish() is called on every
  /// communicator before finish() waits for any. Members that do not arrive within some seconds are not waited for.
  void begin_finish();
  void finish();

 private:
  /// Polls until NCCL is done with the last call; throws its error, or an error if the run has failed.
  void settle(ncclResult_t result, const char* what);
  [[noreturn]] void fail(ncclResult_t result, const char* what) const;
  const Run& run_;
  ncclComm_t handle_ = nullptr;
  ncclResult_t finishing_ = ncclInternalError;  // set by begin_finish
  cudaStream_t stream_ = nullptr;
};

}  // namespace mimo::cuda
