// mimo_group_*: groups at the C ABI.
#include "collective.h"
#include "device_group.h"
#include "error.h"
#include "status.h"

using mimo::guard;
using mimo::cuda::nccl;

struct mimo_group {
  mimo_group(mimo::Run& run, const std::string& name, std::vector<int32_t> ranks)
      : group(run, name, std::move(ranks)) {}
  mimo::cuda::DeviceGroup group;
};

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
      mimo::fail(MIMO_ERROR_ARGUMENT, "A reduction takes f32, bf16, f64 or i32.");
  }
}

/// Rows to and from every member; its own are copied.
ncclResult_t exchange_rows(const mimo::cuda::DeviceGroup& group, const char* x, char* y, const int32_t* rows,
                           int64_t row_bytes, ncclComm_t comm, cudaStream_t queue) {
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
    mimo::cuda::check(cudaMemcpyAsync(y + bytes(2, own), x + bytes(0, own), static_cast<size_t>(bytes(3, own)),
                                      cudaMemcpyDeviceToDevice, queue),
                      "a copy on the device");
  }
  return ncclSuccess;
}

}  // namespace

extern "C" {

int32_t mimo_group_create(mimo_run* run, const char* name, const int32_t* host_ranks, int32_t size,
                          mimo_group** group) {
  return guard([&] {
    *group = new mimo_group(run->run, name, std::vector<int32_t>(host_ranks, host_ranks + size));
  });
}

int32_t mimo_group_destroy(mimo_group* group) {
  return guard([&] { delete group; });
}

int32_t mimo_group_wait(mimo_group* group, mimo_stream* stream, int64_t ticket) {
  return guard([&] {
    stream->device->use();
    group->group.wait(*stream, ticket);
  });
}

int32_t mimo_group_all_reduce(mimo_group* group, mimo_stream* stream, void* x, int64_t elements, int32_t dtype,
                              int32_t reduction, int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(elements >= 0, "mimo_group_all_reduce");
    MIMO_REQUIRE(reduction == MIMO_REDUCTION_SUM || reduction == MIMO_REDUCTION_MAX, "mimo_group_all_reduce");
    stream->device->use();
    const Storage storage = storage_of(dtype);
    const ncclRedOp_t operation = reduction == MIMO_REDUCTION_MAX ? ncclMax : ncclSum;
    *ticket = group->group.collective(*stream, MIMO_COLLECTIVE_ALL_REDUCE, elements * storage.bytes,
                                      [&](ncclComm_t comm, cudaStream_t queue) {
                                        return nccl().AllReduce(x, x, static_cast<size_t>(elements), storage.type,
                                                                operation, comm, queue);
                                      });
  });
}

int32_t mimo_group_reduce_scatter(mimo_group* group, mimo_stream* stream, const void* x, void* y, int64_t elements,
                                  int32_t dtype, int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(elements >= 0, "mimo_group_reduce_scatter");
    stream->device->use();
    const Storage storage = storage_of(dtype);
    *ticket = group->group.collective(*stream, MIMO_COLLECTIVE_REDUCE_SCATTER, elements * storage.bytes,
                                      [&](ncclComm_t comm, cudaStream_t queue) {
                                        return nccl().ReduceScatter(x, y, static_cast<size_t>(elements), storage.type,
                                                                    ncclSum, comm, queue);
                                      });
  });
}

int32_t mimo_group_all_gather(mimo_group* group, mimo_stream* stream, const void* x, void* y, int64_t bytes,
                              int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_group_all_gather");
    stream->device->use();
    *ticket = group->group.collective(*stream, MIMO_COLLECTIVE_ALL_GATHER, bytes,
                                      [&](ncclComm_t comm, cudaStream_t queue) {
                                        return nccl().AllGather(x, y, static_cast<size_t>(bytes), ncclUint8, comm,
                                                                queue);
                                      });
  });
}

int32_t mimo_group_broadcast(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t root,
                             int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_group_broadcast");
    MIMO_REQUIRE(root >= 0 && root < group->group.size(), "mimo_group_broadcast");
    stream->device->use();
    *ticket = group->group.collective(*stream, MIMO_COLLECTIVE_BROADCAST, bytes,
                                      [&](ncclComm_t comm, cudaStream_t queue) {
                                        return nccl().Broadcast(x, x, static_cast<size_t>(bytes), ncclUint8, root,
                                                                comm, queue);
                                      });
  });
}

int32_t mimo_group_all_to_all(mimo_group* group, mimo_stream* stream, const void* x, void* y, const int32_t* host_rows,
                              int64_t row_bytes, int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(row_bytes >= 0, "mimo_group_all_to_all");
    for (int32_t i = 0; i < 4 * group->group.size(); ++i) MIMO_REQUIRE(host_rows[i] >= 0, "mimo_group_all_to_all");
    stream->device->use();
    *ticket = group->group.collective(*stream, MIMO_COLLECTIVE_ALL_TO_ALL, row_bytes,
                                      [&](ncclComm_t comm, cudaStream_t queue) {
                                        return exchange_rows(group->group, static_cast<const char*>(x),
                                                             static_cast<char*>(y), host_rows, row_bytes, comm, queue);
                                      });
  });
}

int32_t mimo_group_send(mimo_group* group, mimo_stream* stream, const void* x, int64_t bytes, int32_t to,
                        int64_t* ticket) {
  return guard([&] {
    stream->device->use();
    *ticket = group->group.send(*stream, x, bytes, to);
  });
}

int32_t mimo_group_receive(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t from,
                           int64_t* ticket) {
  return guard([&] {
    stream->device->use();
    *ticket = group->group.receive(*stream, x, bytes, from);
  });
}

int32_t mimo_group_barrier(mimo_group* group) {
  return guard([&] {
    mimo::Group& host = group->group.host();
    auto call = mimo::make_all_gather(host, nullptr, nullptr, 0, MIMO_COLLECTIVE_BARRIER);
    host.wait(host.start(mimo::Group::collectives, std::move(call)));
  });
}

int32_t mimo_group_exchange(mimo_group* group, const void* host_x, void* host_y, int64_t bytes) {
  return guard([&] {
    mimo::Group& host = group->group.host();
    auto call = mimo::make_all_gather(host, host_x, host_y, bytes, MIMO_COLLECTIVE_EXCHANGE);
    host.wait(host.start(mimo::Group::collectives, std::move(call)));
  });
}

}  // extern "C"
