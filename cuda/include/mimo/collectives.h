/* Groups of ranks and their collectives. */
#pragma once

#include "run.h"
#include "stream.h"

/* NCCL needs a GPU for each rank. Through the host's shared memory ranks may share GPUs; sums are then those of the CPU
 * library (in the order of the members, a NaN is the maximum of everything), and starting a call waits for the stream. */
enum mimo_backend { MIMO_BACKEND_NCCL = 0, MIMO_BACKEND_SHM = 1 };

/* For groups that this process makes from now on, on this device; all ranks say the same backend. The CPU library knows shared
 * memory alone, whatever it is told. */
MIMO_API int32_t mimo_run_set_backend(mimo_run* run, mimo_device* device, int32_t backend);

/* Members call the same operations of a group in the same order; send and receive are matched by pair and direction.
 * A call starts after the stream's earlier work, goes on by itself, and has a ticket; work queued after
 * mimo_group_wait sees its result. Tensors stay as they are until then. Reductions (f32, bf16, f64, i32) add in the order
 * of the members, bf16 with fp32 sums, so that results repeat bit for bit; on CUDA in NCCL's order, which
 * mimo_device_set_deterministic fixes. Every member may have several calls under way, of
 * several groups in any order. */
typedef struct mimo_group mimo_group;

enum mimo_reduction { MIMO_REDUCTION_SUM = 0, MIMO_REDUCTION_MAX = 1 };

/* host_ranks: global ranks of the members, in the group's order, this process among them. A rank makes each group once. */
MIMO_API int32_t mimo_group_create(mimo_run* run, const char* name, const int32_t* host_ranks, int32_t size,
                                   mimo_group** group);
MIMO_API int32_t mimo_group_destroy(mimo_group* group);
MIMO_API int32_t mimo_group_wait(mimo_group* group, mimo_stream* stream, int64_t ticket);
/* x = reduction of every member's x. A NaN is the maximum of everything; on CUDA it is dropped where there is a number. */
MIMO_API int32_t mimo_group_all_reduce(mimo_group* group, mimo_stream* stream, void* x, int64_t elements, int32_t dtype,
                                       int32_t reduction, int64_t* ticket);
/* y [elements] = this member's part of the sum of every member's x [size, elements]. y may be that part of x. */
MIMO_API int32_t mimo_group_reduce_scatter(mimo_group* group, mimo_stream* stream, const void* x, void* y,
                                           int64_t elements, int32_t dtype, int64_t* ticket);
/* y [size, bytes] = every member's x [bytes]. x may be this member's part of y. */
MIMO_API int32_t mimo_group_all_gather(mimo_group* group, mimo_stream* stream, const void* x, void* y, int64_t bytes,
                                       int64_t* ticket);
MIMO_API int32_t mimo_group_broadcast(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t root,
                                      int64_t* ticket);
/* Rows [offset, offset + count) of x go to each member, and come from each into y. host_rows [4, size]: send offsets, send
 * counts, receive offsets, receive counts, in rows. */
MIMO_API int32_t mimo_group_all_to_all(mimo_group* group, mimo_stream* stream, const void* x, void* y,
                                       const int32_t* host_rows, int64_t row_bytes, int64_t* ticket);
MIMO_API int32_t mimo_group_send(mimo_group* group, mimo_stream* stream, const void* x, int64_t bytes, int32_t to,
                                 int64_t* ticket);
MIMO_API int32_t mimo_group_receive(mimo_group* group, mimo_stream* stream, void* x, int64_t bytes, int32_t from,
                                    int64_t* ticket);
/* Returns when every member has called it. */
MIMO_API int32_t mimo_group_barrier(mimo_group* group);
/* host_y [size, bytes] = every member's host_x [bytes]; host memory, waits. With host_y null this member gives its own bytes and
 * waits for no others. */
MIMO_API int32_t mimo_group_exchange(mimo_group* group, const void* host_x, void* host_y, int64_t bytes);
