/* Groups of ranks, their collectives and messages, and the backend that moves their tensors. */
#pragma once

#include "run.h"
#include "stream.h"

enum mimo_backend {
  MIMO_BACKEND_NCCL = 0, /* a GPU for each rank */
  /* Through the host's shared memory: ranks may share GPUs, reductions are those of the CPU library, and starting a call waits
   * for the stream. */
  MIMO_BACKEND_SHM = 1
};

/* Sets the device and backend of the groups that this process creates from now on; all ranks give the same backend. The CPU
 * library uses shared memory whatever the backend. */
MIMO_API int32_t mimo_run_set_backend(mimo_run* run, mimo_device* device, int32_t backend);

/* All members call the same collectives of a group in the same order; a send is matched with a receive by pair and direction.
 * A call starts after the stream's earlier work, runs concurrently with later work, and returns a ticket; work queued after
 * mimo_group_wait sees its result. Until then its tensors must not be written or freed, and its outputs not read. Several calls
 * may be pending, of several groups in any order. Reductions take f32, bf16, f64 and i32. Through shared memory
 * they add in the order of the members, bf16 with fp32 sums, and repeat bit for bit; NCCL chooses the order, which
 * mimo_device_set_deterministic fixes. When the run fails, calls and waits return MIMO_ERROR_PEER. */
typedef struct mimo_group mimo_group;

enum mimo_reduction { MIMO_REDUCTION_SUM = 0, MIMO_REDUCTION_MAX = 1 };

/* host_ranks [size]: global ranks of the members in the group's order, two or more, this process among them. A rank creates
 * each group once. */
MIMO_API int32_t mimo_group_create(mimo_run* run, const char* name, const int32_t* host_ranks, int32_t size,
                                   mimo_group** group);
MIMO_API int32_t mimo_group_destroy(mimo_group* group);
/* Work queued on `stream` from now on starts after the call of the ticket. The CPU library waits for the call itself. */
MIMO_API int32_t mimo_group_wait(mimo_group* group, mimo_stream* stream, int64_t ticket);
/* x [elements] = the reduction of every member's x. MIMO_REDUCTION_MAX: through shared memory NaN propagates; NCCL ignores
 * it if another member has a number. */
MIMO_API int32_t mimo_group_all_reduce(mimo_group* group, mimo_stream* stream, void* x, int64_t elements, int32_t dtype,
                                       int32_t reduction, int64_t* ticket);
/* y [elements] = this member's row of the sum of every member's x [size, elements]. y may be that row of x. */
MIMO_API int32_t mimo_group_reduce_scatter(mimo_group* group, mimo_stream* stream, const void* x, void* y,
                                           int64_t elements, int32_t dtype, int64_t* ticket);
/* y [size, bytes] = every member's x [bytes]. x may be this member's row of y. */
MIMO_API int32_t mimo_group_all_gather(mimo_group* group, mimo_stream* stream, const void* x, void* y, int64_t bytes,
                                       int64_t* ticket);
/* x [bytes] = that of member `root`, an index in the group. */
MIMO_API int32_t mimo_group_broadcast(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t root,
                                      int64_t* ticket);
/* For each member, rows [send offset, + send count) of x go to it, and rows from it become rows [receive offset, + receive
 * count) of y. host_rows [4, size]: send offsets, send counts, receive offsets, receive counts, in rows of row_bytes. */
MIMO_API int32_t mimo_group_all_to_all(mimo_group* group, mimo_stream* stream, const void* x, void* y,
                                       const int32_t* host_rows, int64_t row_bytes, int64_t* ticket);
/* `to` and `from` are indices in the group. */
MIMO_API int32_t mimo_group_send(mimo_group* group, mimo_stream* stream, const void* x, int64_t bytes, int32_t to,
                                 int64_t* ticket);
MIMO_API int32_t mimo_group_receive(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t from,
                                    int64_t* ticket);
/* Waits until every member has called it. */
MIMO_API int32_t mimo_group_barrier(mimo_group* group);
/* host_y [size, bytes] = every member's host_x [bytes]: in host memory; waits for the other members. With host_y null this
 * member only contributes its bytes and does not wait. */
MIMO_API int32_t mimo_group_exchange(mimo_group* group, const void* host_x, void* host_y, int64_t bytes);
