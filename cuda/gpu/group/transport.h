// How the tensors of a group move between GPUs.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "group.h"

namespace mimo::cuda {

/// Calls start after their stream's work and return a ticket; arguments are those of mimo_group_*.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int32_t size() const = 0;
  /// Waits until all members have called it.
  virtual void barrier() = 0;
  /// y [size, bytes] = every member's x, both in host memory.
  virtual void exchange(const void* x, void* y, int64_t bytes) = 0;
  virtual int64_t all_reduce(mimo_stream& stream, void* x, int64_t elements, int32_t dtype, int32_t reduction) = 0;
  virtual int64_t reduce_scatter(mimo_stream& stream, const void* x, void* y, int64_t elements, int32_t dtype) = 0;
  virtual int64_t all_gather(mimo_stream& stream, const void* x, void* y, int64_t bytes) = 0;
  virtual int64_t broadcast(mimo_stream& stream, void* x, int64_t bytes, int32_t root) = 0;
  virtual int64_t all_to_all(mimo_stream& stream, const void* x, void* y, const int32_t* rows, int64_t row_bytes) = 0;
  virtual int64_t exchange_rows(mimo_stream& stream, const mimo_row_exchange& rows, const int32_t* host_ranges) = 0;
  /// MIMO_ROW_TRANSPORT_*; determined by the first call, which waits for all members.
  virtual int32_t row_transport() = 0;
  virtual int64_t send(mimo_stream& stream, const void* x, int64_t bytes, int32_t to) = 0;
  virtual int64_t receive(mimo_stream& stream, void* x, int64_t bytes, int32_t from) = 0;
  /// Makes later work of the stream see the call's result.
  virtual void wait(mimo_stream& stream, int64_t ticket) = 0;
};

/// NCCL; every rank needs its own GPU.
std::unique_ptr<Transport> nccl_transport(Run& run, const std::string& name, std::vector<int32_t> ranks);
/// Through the host's shared memory; ranks may share GPUs.
std::unique_ptr<Transport> shm_transport(Run& run, const std::string& name, std::vector<int32_t> ranks);

}  // namespace mimo::cuda
