/* Expert-parallel all-to-all of token rows whose row counts are only known on the device. */
#pragma once

#include "collectives.h"

/* Side on which rows are staged for MIMO_ROW_TRANSPORT_PEERS: the sender's, from which receivers read, or the receiver's, to
 * which senders write. */
enum mimo_row_stage { MIMO_ROW_STAGE_SENDER = 0, MIMO_ROW_STAGE_RECEIVER = 1 };

/* How mimo_group_exchange_rows moves rows. */
enum mimo_row_transport {
  MIMO_ROW_TRANSPORT_HOST = 0,  /* through the host's shared memory */
  MIMO_ROW_TRANSPORT_PEERS = 1, /* GPUs of a host read and write each other's memory */
  MIMO_ROW_TRANSPORT_COUNTS = 2 /* NCCL messages, which need the ranges on the host */
};

/* Ranges of rows are device int32 [size, ranges, 3], as written by mimo_expert_exchange_plan: for each member and range the
 * first row here, the first row at the member, and the number of rows. A's send_ranges for B equal B's receive_ranges for A
 * with "here" and "at the member" swapped. Ranges of y do not overlap. */
typedef struct mimo_row_exchange {
  const void* x;                 /* [x_rows], rows of row_bytes */
  void* y;                       /* [y_rows], rows of row_bytes */
  const void* beside_x;          /* [x_rows], rows of beside_row_bytes sent along with the rows of x; or null */
  void* beside_y;                /* [y_rows]; null where beside_x is */
  const int32_t* send_ranges;    /* of x */
  const int32_t* receive_ranges; /* of y */
  int64_t ranges;                /* ranges to and from each member */
  int64_t row_bytes;
  int64_t beside_row_bytes; /* 0 without beside_x */
  int64_t x_rows;           /* upper bound of the rows of x */
  int64_t y_rows;           /* upper bound of the rows of y */
  int64_t stage_rows;       /* upper bound of the staged side's rows at any member; equal at all members */
  int32_t stage;            /* MIMO_ROW_STAGE_* */
} mimo_row_exchange;

/* host_ranges [2, size, ranges, 3]: copies of send_ranges and receive_ranges for MIMO_ROW_TRANSPORT_COUNTS; null for the other
 * transports. */
MIMO_API int32_t mimo_group_exchange_rows(mimo_group* group, mimo_stream* stream, const mimo_row_exchange* rows,
                                          const int32_t* host_ranges, int64_t* ticket);
/* Prepares mimo_group_exchange_rows; a collective call. `transport` receives MIMO_ROW_TRANSPORT_*, equal at all members. */
MIMO_API int32_t mimo_group_row_transport(mimo_group* group, mimo_stream* stream, int32_t* transport);
