/*
 * Streams and events. Operations are queued on a stream and run in order; an event marks a position in that order. In the CPU
 * library all work is complete when a call returns.
 */
#pragma once

#include "device.h"

typedef struct mimo_stream mimo_stream;
typedef struct mimo_event mimo_event;

/* priority: 0 is normal; negative values run first, clamped to the GPU's range. The CPU library ignores it. */
MIMO_API int32_t mimo_stream_create(mimo_device* device, int32_t priority, mimo_stream** stream);
/* Waits for the stream's work first. */
MIMO_API int32_t mimo_stream_destroy(mimo_stream* stream);
/* Waits until all work queued on the stream is done; returns its error. */
MIMO_API int32_t mimo_stream_synchronize(mimo_stream* stream);

/* Statistics of a stream's CUDA graphs since mimo_stream_set_graphs enabled them. */
typedef struct mimo_graph_statistics {
  int64_t graphs;               /* graphs recorded */
  int64_t launches;             /* launches of those graphs */
  int64_t operations_in_graphs; /* operations that graphs launched */
  int64_t operations_alone;     /* operations launched one by one */
} mimo_graph_statistics;

/* wanted 1: operations are held back until an event, a collective or a copy to or from the host needs them queued, or 64 are
 * held. A run of operations that occurred before with identical arguments, addresses included, is launched as one CUDA graph.
 * An operation's error may be returned by a later call. Call mimo_device_set_deterministic before. 0 (default): each operation
 * is queued at once. The CPU library returns MIMO_ERROR_UNSUPPORTED for 1. */
MIMO_API int32_t mimo_stream_set_graphs(mimo_stream* stream, int32_t wanted);
MIMO_API int32_t mimo_stream_graph_statistics(mimo_stream* stream, mimo_graph_statistics* statistics);

MIMO_API int32_t mimo_event_create(mimo_device* device, mimo_event** event);
MIMO_API int32_t mimo_event_destroy(mimo_event* event);
/* The event marks the end of what is queued on the stream so far. */
MIMO_API int32_t mimo_event_record(mimo_event* event, mimo_stream* stream);
/* Work queued on `stream` from now on starts after the work that `event` marks. */
MIMO_API int32_t mimo_stream_wait_event(mimo_stream* stream, mimo_event* event);
/* Waits until the work that `event` marks is done. */
MIMO_API int32_t mimo_event_synchronize(mimo_event* event);
/* Milliseconds from `start` to `end`; the work that both mark is done. */
MIMO_API int32_t mimo_event_elapsed(mimo_event* start, mimo_event* end, float* milliseconds);
