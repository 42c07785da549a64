/* Streams, which operations are queued on; the CUDA graphs they launch; and events, marks in a stream's work. */
#pragma once

#include "device.h"

typedef struct mimo_stream mimo_stream;
typedef struct mimo_event mimo_event;

/* priority: 0 normal, negative is served first where the device can. */
MIMO_API int32_t mimo_stream_create(mimo_device* device, int32_t priority, mimo_stream** stream);
MIMO_API int32_t mimo_stream_destroy(mimo_stream* stream);
MIMO_API int32_t mimo_stream_synchronize(mimo_stream* stream);

/* How much of a stream's work was launched as CUDA graphs since they were turned on. */
typedef struct mimo_graph_statistics {
  int64_t graphs;               /* recorded */
  int64_t launches;             /* of graphs */
  int64_t operations_in_graphs; /* launched by them */
  int64_t operations_alone;     /* launched one by one */
} mimo_graph_statistics;

/* 1: operations are held back until something needs them queued (an event, a collective, a copy to or from the host, 64 of
 * them), and launched as one CUDA graph where just the same ones, addresses included, came before. An error of an operation
 * may be returned by a later call. mimo_device_set_deterministic comes before it. 0 (default): each is queued at once. Only
 * on CUDA: the CPU library returns MIMO_ERROR_UNSUPPORTED for 1. */
MIMO_API int32_t mimo_stream_set_graphs(mimo_stream* stream, int32_t wanted);
MIMO_API int32_t mimo_stream_graph_statistics(mimo_stream* stream, mimo_graph_statistics* statistics);

MIMO_API int32_t mimo_event_create(mimo_device* device, mimo_event** event);
MIMO_API int32_t mimo_event_destroy(mimo_event* event);
MIMO_API int32_t mimo_event_record(mimo_event* event, mimo_stream* stream);
/* Work queued on `stream` from now on starts after the work that `event` recorded. */
MIMO_API int32_t mimo_stream_wait_event(mimo_stream* stream, mimo_event* event);
MIMO_API int32_t mimo_event_synchronize(mimo_event* event);
/* Milliseconds from `start` to `end`, both recorded and finished. */
MIMO_API int32_t mimo_event_elapsed(mimo_event* start, mimo_event* end, float* milliseconds);
