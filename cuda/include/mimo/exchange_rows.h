/* Exchange of tokens' rows between the ranks that hold experts: an all-to-all whose row counts only the device knows. */
#pragma once

#include "collectives.h"

/* At which side rows are staged for MIMO_ROW_TRANSPORT_PEERS: the sender's, from which receivers read, or the receiver's, to
 * which senders write. */
enum mimo_row_stage { MIMO_ROW_STAGE_SENDER = 0, MIMO_ROW_STAGE_RECEIVER = 1 };

/* How mimo_group_exchange_rows moves rows. */
enum mimo_row_transport {
  MIMO_ROW_TRANSPORT_HOST = 0,  /* through the host's shared memory */
  MIMO_ROW_TRANSPORT_PEERS = 1, /* GPUs of a host read and write each other's memory */
  MIMO_ROW_TRANSPORT_COUNTS = 2 /* messages of NCCL, for which the host has to know the ranges */
};

/* Ranges of rows are device int32 [size, ranges, 3], as mimo_expert_exchange_plan writes them: for each member, each range's
 * first row here, its first row at the member, and its number of rows. What A's send_ranges say of B, B's receive_ranges say
 * of A, with "here" and "at the member" swapped. Ranges of y do not overlap. */
typedef struct mimo_row_exchange {
  const void* x;                 /* [x_rows], rows of row_bytes */
  void* y;                       /* [y_rows], rows of row_bytes */
  const void* beside_x;          /* [x_rows], rows of beside_row_bytes that go with the rows of x; or null */
  void* beside_y;                /* [y_rows]; null where beside_x is */
  const int32_t* send_ranges;    /* of x */
  const int32_t* receive_ranges; /* of y */
  int64_t ranges;                /* ranges to and from each member */
  int64_t row_bytes;
  int64_t beside_row_bytes; /* 0 without beside_x */
  int64_t x_rows;           /* upper bound of the rows of x */
  int64_t y_rows;           /* upper bound of the rows of y */
  int64_t stage_rows;       /* upper bound of the staged side's rows at any member; the same number at all members */
  int32_t stage;            /* MIMO_ROW_STAGE_* */
} mimo_row_exchange;

/* host_ranges [2, size, ranges, 3]: copies of send_ranges and receive_ranges for MIMO_ROW_TRANSPORT_COUNTS; null for the other
 * transports. */
MIMO_API int32_t mimo_group_exchange_rows(mimo_group* group, mimo_stream* stream, const mimo_row_exchange* rows,
                                          const int32_t* host_ranges, int64_t* ticket);
/* Prepares mimo_group_exchange_rows: a collective that every member calls. `transport` receives MIMO_ROW_TRANSPORT_*, the same
 * at all members. */
MIMO_API int32_t mimo_group_row_transport(mimo_group* group, mimo_stream* stream, int32_t* transport);
