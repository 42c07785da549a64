// mimo_group_*: groups at the C ABI. This library's streams have finished all work before a call returns, so the
// functions ignore them.
#include "collective.h"
#include "status.h"

struct mimo_group {
  mimo_group(mimo::Run& run, const std::string& name, std::vector<int32_t> ranks)
      : group(run, name, std::move(ranks)) {}
  mimo::Group group;
};

using mimo::guard;

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

int32_t mimo_group_wait(mimo_group* group, mimo_stream*, int64_t ticket) {
  return guard([&] { group->group.wait(ticket); });
}

int32_t mimo_group_all_reduce(mimo_group* group, mimo_stream*, void* x, int64_t elements, int32_t dtype,
                              int32_t reduction, int64_t* ticket) {
  return guard([&] {
    *ticket = group->group.start(mimo::Group::collectives,
                                 mimo::make_all_reduce(group->group, x, elements, dtype, reduction));
  });
}

int32_t mimo_group_reduce_scatter(mimo_group* group, mimo_stream*, const void* x, void* y, int64_t elements,
                                  int32_t dtype, int64_t* ticket) {
  return guard([&] {
    *ticket =
        group->group.start(mimo::Group::collectives, mimo::make_reduce_scatter(group->group, x, y, elements, dtype));
  });
}

int32_t mimo_group_all_gather(mimo_group* group, mimo_stream*, const void* x, void* y, int64_t bytes,
                              int64_t* ticket) {
  return guard([&] {
    *ticket = group->group.start(mimo::Group::collectives,
                                 mimo::make_all_gather(group->group, x, y, bytes, MIMO_COLLECTIVE_ALL_GATHER));
  });
}

int32_t mimo_group_broadcast(mimo_group* group, mimo_stream*, void* x, int64_t bytes, int32_t root, int64_t* ticket) {
  return guard([&] {
    *ticket = group->group.start(mimo::Group::collectives, mimo::make_broadcast(group->group, x, bytes, root));
  });
}

int32_t mimo_group_all_to_all(mimo_group* group, mimo_stream*, const void* x, void* y, const int32_t* host_rows,
                              int64_t row_bytes, int64_t* ticket) {
  return guard([&] {
    *ticket = group->group.start(mimo::Group::collectives,
                                 mimo::make_all_to_all(group->group, x, y, host_rows, row_bytes));
  });
}

int32_t mimo_group_exchange_rows(mimo_group* group, mimo_stream*, const mimo_row_exchange* rows,
                                 const int32_t*, int64_t* ticket) {
  return guard([&] {
    *ticket = group->group.start(mimo::Group::collectives, mimo::make_exchange_rows(group->group, *rows));
  });
}

int32_t mimo_group_row_transport(mimo_group*, mimo_stream*, int32_t* transport) {
  *transport = MIMO_ROW_TRANSPORT_HOST;
  return MIMO_OK;
}

int32_t mimo_group_send(mimo_group* group, mimo_stream*, const void* x, int64_t bytes, int32_t to, int64_t* ticket) {
  return guard([&] {
    *ticket = group->group.start(group->group.lane_to(to), mimo::make_send(group->group, x, bytes, to));
  });
}

int32_t mimo_group_receive(mimo_group* group, mimo_stream*, void* x, int64_t bytes, int32_t from, int64_t* ticket) {
  return guard([&] {
    *ticket = group->group.start(group->group.lane_from(from), mimo::make_receive(group->group, x, bytes, from));
  });
}

int32_t mimo_group_barrier(mimo_group* group) {
  return guard([&] { mimo::barrier(group->group); });
}

int32_t mimo_group_exchange(mimo_group* group, const void* host_x, void* host_y, int64_t bytes) {
  return guard([&] { mimo::exchange(group->group, host_x, host_y, bytes); });
}

}  // extern "C"
