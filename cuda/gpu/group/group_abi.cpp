// mimo_group_*: groups at the C ABI.
#include "status.h"
#include "transport.h"

struct mimo_group {
  std::unique_ptr<mimo::cuda::Transport> transport;
};

using mimo::guard;

extern "C" {

int32_t mimo_group_create(mimo_run* run, const char* name, const int32_t* host_ranks, int32_t size,
                          mimo_group** group) {
  return guard([&] {
    const auto transport = run->run.backend == MIMO_BACKEND_SHM ? mimo::cuda::shm_transport : mimo::cuda::nccl_transport;
    *group = new mimo_group{transport(run->run, name, std::vector<int32_t>(host_ranks, host_ranks + size))};
  });
}

int32_t mimo_group_destroy(mimo_group* group) {
  return guard([&] { delete group; });
}

int32_t mimo_group_wait(mimo_group* group, mimo_stream* stream, int64_t ticket) {
  return guard([&] {
    stream->device->use();
    // Whether or not the call is done: runs of operations must end at the same places in every step.
    stream->flush();
    group->transport->wait(*stream, ticket);
  });
}

int32_t mimo_group_all_reduce(mimo_group* group, mimo_stream* stream, void* x, int64_t elements, int32_t dtype,
                              int32_t reduction, int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(elements >= 0, "mimo_group_all_reduce");
    MIMO_REQUIRE(reduction == MIMO_REDUCTION_SUM || reduction == MIMO_REDUCTION_MAX, "mimo_group_all_reduce");
    stream->device->use();
    *ticket = group->transport->all_reduce(*stream, x, elements, dtype, reduction);
  });
}

int32_t mimo_group_reduce_scatter(mimo_group* group, mimo_stream* stream, const void* x, void* y, int64_t elements,
                                  int32_t dtype, int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(elements >= 0, "mimo_group_reduce_scatter");
    stream->device->use();
    *ticket = group->transport->reduce_scatter(*stream, x, y, elements, dtype);
  });
}

int32_t mimo_group_all_gather(mimo_group* group, mimo_stream* stream, const void* x, void* y, int64_t bytes,
                              int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_group_all_gather");
    stream->device->use();
    *ticket = group->transport->all_gather(*stream, x, y, bytes);
  });
}

int32_t mimo_group_broadcast(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t root,
                             int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_group_broadcast");
    MIMO_REQUIRE(root >= 0 && root < group->transport->size(), "mimo_group_broadcast");
    stream->device->use();
    *ticket = group->transport->broadcast(*stream, x, bytes, root);
  });
}

int32_t mimo_group_all_to_all(mimo_group* group, mimo_stream* stream, const void* x, void* y, const int32_t* host_rows,
                              int64_t row_bytes, int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(row_bytes >= 0, "mimo_group_all_to_all");
    const int32_t size = group->transport->size();
    for (int32_t i = 0; i < 4 * size; ++i) MIMO_REQUIRE(host_rows[i] >= 0, "mimo_group_all_to_all");
    stream->device->use();
    *ticket = group->transport->all_to_all(*stream, x, y, host_rows, row_bytes);
  });
}

int32_t mimo_group_exchange_rows(mimo_group* group, mimo_stream* stream, const mimo_row_exchange* rows,
                                 const int32_t* host_ranges, int64_t* ticket) {
  return guard([&] {
    MIMO_REQUIRE(rows->ranges > 0 && rows->row_bytes > 0 && rows->beside_row_bytes >= 0, "mimo_group_exchange_rows");
    MIMO_REQUIRE((rows->beside_x == nullptr) == (rows->beside_y == nullptr), "mimo_group_exchange_rows");
    const int64_t staged = rows->stage == MIMO_ROW_STAGE_SENDER ? rows->x_rows : rows->y_rows;
    MIMO_REQUIRE(staged <= rows->stage_rows, "mimo_group_exchange_rows");
    stream->device->use();
    *ticket = group->transport->exchange_rows(*stream, *rows, host_ranges);
  });
}

int32_t mimo_group_row_transport(mimo_group* group, mimo_stream* stream, int32_t* transport) {
  return guard([&] {
    stream->device->use();
    *transport = group->transport->row_transport();
  });
}

int32_t mimo_group_send(mimo_group* group, mimo_stream* stream, const void* x, int64_t bytes, int32_t to,
                        int64_t* ticket) {
  return guard([&] {
    stream->device->use();
    *ticket = group->transport->send(*stream, x, bytes, to);
  });
}

int32_t mimo_group_receive(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t from,
                           int64_t* ticket) {
  return guard([&] {
    stream->device->use();
    *ticket = group->transport->receive(*stream, x, bytes, from);
  });
}

int32_t mimo_group_barrier(mimo_group* group) {
  return guard([&] { group->transport->barrier(); });
}

int32_t mimo_group_exchange(mimo_group* group, const void* host_x, void* host_y, int64_t bytes) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_group_exchange");
    group->transport->exchange(host_x, host_y, bytes);
  });
}

}  // extern "C"
