// NCCL's communicators: opened at run time, made without blocking, so that a wait for absent ranks ends with the run.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <functional>

#include "run.h"

namespace mimo::cuda {

/// The functions of NCCL that are used.
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

/// Takes some tenths of a second, and may be called from any thread.
void abort_communicator(ncclComm_t handle);

/// A communicator and the stream its operations are queued on.
class Communicator {
 public:
  /// Returns when all `size` members have called it. `channels` 0: NCCL's own choice.
  Communicator(const Run& run, const ncclUniqueId& id, int32_t size, int32_t rank, int32_t channels);
  /// Gives up a communicator that is not ready yet.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  cudaStream_t stream() const { return stream_; }
  /// Queues the calls of NCCL that `body` makes, as one group.
  void queue(const char* what, const std::function<ncclResult_t(ncclComm_t, cudaStream_t)>& body);
  /// No calls can be queued afterwards. Queued calls end, wherever they wait, when abort_communicator() is called with
  /// the returned value; null: there is no call to end.
  ncclComm_t give_up();
  /// The end in two steps, because members may come to it in different orders: every communicator is told to finish before
  /// one is waited for. Members that do not come within some seconds are not waited for.
  void begin_finish();
  void finish();

 private:
  /// Returns when NCCL is no longer busy with the last call; throws its error, or when the run has failed.
  void settle(ncclResult_t result, const char* what);
  const Run& run_;
  ncclComm_t handle_ = nullptr;
  ncclResult_t finishing_ = ncclInternalError;  // since begin_finish
  cudaStream_t stream_ = nullptr;
};

}  // namespace mimo::cuda
