/* Exchange of rows between the ranks that hold experts. */
#pragma once

#include "collectives.h"

/* Where rows lie when other members reach for them: at their sender, or at their receiver. */
enum mimo_row_stage { MIMO_ROW_STAGE_SENDER = 0, MIMO_ROW_STAGE_RECEIVER = 1 };

/* How mimo_group_exchange_rows moves rows. */
enum mimo_row_transport {
  MIMO_ROW_TRANSPORT_HOST = 0,  /* through the host's shared memory */
  MIMO_ROW_TRANSPORT_PEERS = 1, /* GPUs of a host read and write each other's memory */
  MIMO_ROW_TRANSPORT_COUNTS = 2 /* NCCL's messages, for which the host has to know the ranges */
};

/* Rows whose places the device knows: those that mimo_expert_exchange_plan finds. Ranges [size, ranges, 3] say for each member, of
 * every run of rows, its first row here, its first row at the member, and how many rows; the receive_ranges of a member B say of
 * a member A the same as A's send_ranges say of B. Ranges of y do not overlap. */
typedef struct mimo_row_exchange {
  const void* x; /* rows of row_bytes */
  void* y;
  const void* beside_x; /* rows of beside_row_bytes that go the same way in the same message, or null */
  void* beside_y;
  const int32_t* send_ranges;
  const int32_t* receive_ranges;
  int64_t ranges;
  int64_t row_bytes;
  int64_t beside_row_bytes;
  int64_t x_rows; /* upper bounds of the rows of x and y */
  int64_t y_rows;
  int64_t stage_rows; /* upper bound of the rows of that side, the same at all members */
  int32_t stage;      /* MIMO_ROW_STAGE_* */
} mimo_row_exchange;

/* host_ranges [2, size, ranges, 3]: copies of send_ranges and receive_ranges; only MIMO_ROW_TRANSPORT_COUNTS reads it, for other
 * transports it may be null. */
MIMO_API int32_t mimo_group_exchange_rows(mimo_group* group, mimo_stream* stream, const mimo_row_exchange* rows,
                                          const int32_t* host_ranges, int64_t* ticket);
/* Prepares mimo_group_exchange_rows: every member calls it. `transport`: MIMO_ROW_TRANSPORT_*, the same at all. */
MIMO_API int32_t mimo_group_row_transport(mimo_group* group, mimo_stream* stream, int32_t* transport);
