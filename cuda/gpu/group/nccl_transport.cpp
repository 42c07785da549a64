// Collectives through NCCL.
#include "device_group.h"
#include "error.h"
#include "row_range.h"
#include "status.h"
#include "transport.h"

namespace mimo::cuda {
namespace {

struct Storage {
  ncclDataType_t type;
  int64_t bytes;
};

Storage storage_of(int32_t dtype) {
  switch (dtype) {
    case MIMO_DTYPE_F32:
      return {ncclFloat32, 4};
    case MIMO_DTYPE_I32:
      return {ncclInt32, 4};
    case MIMO_DTYPE_BF16:
      return {ncclBfloat16, 2};
    case MIMO_DTYPE_F64:
      return {ncclFloat64, 8};
    default:
      fail(MIMO_ERROR_ARGUMENT, "A reduction takes f32, bf16, f64 or i32.");
  }
}

/// Rows to and from every member; a member's own rows are copied.
ncclResult_t exchange_counted(const DeviceGroup& group, const char* x, char* y, const int32_t* rows, int64_t row_bytes,
                              ncclComm_t comm, cudaStream_t queue) {
  const int32_t size = group.size();
  const auto bytes = [&](int32_t table, int32_t member) { return rows[table * size + member] * row_bytes; };
  for (int32_t member = 0; member < size; ++member) {
    if (member == group.rank()) continue;
    if (bytes(1, member) > 0) {
      const ncclResult_t sent = nccl().Send(x + bytes(0, member), static_cast<size_t>(bytes(1, member)), ncclUint8,
                                            member, comm, queue);
      if (sent != ncclSuccess && sent != ncclInProgress) return sent;
    }
    if (bytes(3, member) > 0) {
      const ncclResult_t received = nccl().Recv(y + bytes(2, member), static_cast<size_t>(bytes(3, member)), ncclUint8,
                                                member, comm, queue);
      if (received != ncclSuccess && received != ncclInProgress) return received;
    }
  }
  const int32_t own = group.rank();
  if (bytes(3, own) > 0) {
    check(cudaMemcpyAsync(y + bytes(2, own), x + bytes(0, own), static_cast<size_t>(bytes(3, own)),
                          cudaMemcpyDeviceToDevice, queue),
          "a copy on the device");
  }
  return ncclSuccess;
}

/// Row ranges to and from every member, of the tensor and of the one beside it; a member's own ranges are copied.
/// Messages of a pair match in the order of its ranges.
ncclResult_t exchange_ranges(const DeviceGroup& group, const mimo_row_exchange& rows, const RowRange* ranges, ncclComm_t comm,
                             cudaStream_t queue) {
  const struct {
    const char* x;
    char* y;
    int64_t row_bytes;
  } parts[] = {{static_cast<const char*>(rows.x), static_cast<char*>(rows.y), rows.row_bytes},
               {static_cast<const char*>(rows.beside_x), static_cast<char*>(rows.beside_y), rows.beside_row_bytes}};
  const RowRange* const sent = ranges;
  const RowRange* const received = ranges + group.size() * rows.ranges;
  for (const auto& part : parts) {
    if (part.x == nullptr) continue;
    const auto bytes = [&](int64_t count) { return static_cast<size_t>(count * part.row_bytes); };
    for (int64_t i = 0; i < group.size() * rows.ranges; ++i) {
      const auto member = static_cast<int32_t>(i / rows.ranges);
      const char* from = part.x + sent[i].here * part.row_bytes;
      char* to = part.y + received[i].here * part.row_bytes;
      if (member == group.rank()) {
        if (sent[i].rows > 0) {
          check(cudaMemcpyAsync(to, from, bytes(sent[i].rows), cudaMemcpyDeviceToDevice, queue), "a copy on the device");
        }
        continue;
      }
      ncclResult_t result = ncclSuccess;
      if (sent[i].rows > 0) result = nccl().Send(from, bytes(sent[i].rows), ncclUint8, member, comm, queue);
      if (result != ncclSuccess && result != ncclInProgress) return result;
      if (received[i].rows > 0) result = nccl().Recv(to, bytes(received[i].rows), ncclUint8, member, comm, queue);
      if (result != ncclSuccess && result != ncclInProgress) return result;
    }
  }
  return ncclSuccess;
}

class NcclTransport final : public Transport {
 public:
  NcclTransport(Run& run, const std::string& name, std::vector<int32_t> ranks) : group_(run, name, std::move(ranks)) {}

  int32_t size() const override { return group_.size(); }
  void barrier() override { group_.barrier(); }
  void exchange(const void* x, void* y, int64_t bytes) override { group_.exchange(x, y, bytes); }

  int64_t all_reduce(mimo_stream& stream, void* x, int64_t elements, int32_t dtype, int32_t reduction) override {
    const Storage storage = storage_of(dtype);
    const ncclRedOp_t operation = reduction == MIMO_REDUCTION_MAX ? ncclMax : ncclSum;
    return group_.collective(stream, MIMO_COLLECTIVE_ALL_REDUCE, elements * storage.bytes,
                             [&](ncclComm_t comm, cudaStream_t queue) {
                               return nccl().AllReduce(x, x, static_cast<size_t>(elements), storage.type, operation,
                                                       comm, queue);
                             });
  }

  int64_t reduce_scatter(mimo_stream& stream, const void* x, void* y, int64_t elements, int32_t dtype) override {
    const Storage storage = storage_of(dtype);
    return group_.collective(stream, MIMO_COLLECTIVE_REDUCE_SCATTER, elements * storage.bytes,
                             [&](ncclComm_t comm, cudaStream_t queue) {
                               return nccl().ReduceScatter(x, y, static_cast<size_t>(elements), storage.type, ncclSum,
                                                           comm, queue);
                             });
  }

  int64_t all_gather(mimo_stream& stream, const void* x, void* y, int64_t bytes) override {
    return group_.collective(stream, MIMO_COLLECTIVE_ALL_GATHER, bytes, [&](ncclComm_t comm, cudaStream_t queue) {
      return nccl().AllGather(x, y, static_cast<size_t>(bytes), ncclUint8, comm, queue);
    });
  }

  int64_t broadcast(mimo_stream& stream, void* x, int64_t bytes, int32_t root) override {
    return group_.collective(stream, MIMO_COLLECTIVE_BROADCAST, bytes, [&](ncclComm_t comm, cudaStream_t queue) {
      return nccl().Broadcast(x, x, static_cast<size_t>(bytes), ncclUint8, root, comm, queue);
    });
  }

  int64_t all_to_all(mimo_stream& stream, const void* x, void* y, const int32_t* rows, int64_t row_bytes) override {
    return group_.collective(stream, MIMO_COLLECTIVE_ALL_TO_ALL, row_bytes, [&](ncclComm_t comm, cudaStream_t queue) {
      return exchange_counted(group_, static_cast<const char*>(x), static_cast<char*>(y), rows, row_bytes, comm, queue);
    });
  }

  int64_t exchange_rows(mimo_stream& stream, const mimo_row_exchange& rows, const int32_t* host_ranges) override {
    const int64_t bytes = rows.row_bytes + rows.beside_row_bytes;
    if (PeerRows* const peers = group_.peer_rows()) {
      peers->reserve(rows);
      return group_.collective(stream, MIMO_COLLECTIVE_EXCHANGE_ROWS, bytes, [&](ncclComm_t, cudaStream_t queue) {
        peers->exchange(rows, queue);
        return ncclSuccess;
      });
    }
    MIMO_REQUIRE(host_ranges != nullptr, "mimo_group_exchange_rows");
    return group_.collective(stream, MIMO_COLLECTIVE_EXCHANGE_ROWS, bytes, [&](ncclComm_t comm, cudaStream_t queue) {
      return exchange_ranges(group_, rows, reinterpret_cast<const RowRange*>(host_ranges), comm, queue);
    });
  }
  int32_t row_transport() override {
    return group_.peer_rows() ? MIMO_ROW_TRANSPORT_PEERS : MIMO_ROW_TRANSPORT_COUNTS;
  }
  int64_t send(mimo_stream& stream, const void* x, int64_t bytes, int32_t to) override {
    return group_.send(stream, x, bytes, to);
  }
  int64_t receive(mimo_stream& stream, void* x, int64_t bytes, int32_t from) override {
    return group_.receive(stream, x, bytes, from);
  }
  void wait(mimo_stream& stream, int64_t ticket) override { group_.wait(stream, ticket); }

 private:
  DeviceGroup group_;
};

}  // namespace

std::unique_ptr<Transport> nccl_transport(Run& run, const std::string& name, std::vector<int32_t> ranks) {
  return std::make_unique<NcclTransport>(run, name, std::move(ranks));
}

}  // namespace mimo::cuda
