/*
 * Streams and events. Operations are queued on a stream and run in its order; an event marks a place in that order. The CPU
 * library has done all work when a call returns.
 */
#pragma once

#include "device.h"

typedef struct mimo_stream mimo_stream;
typedef struct mimo_event mimo_event;

/* priority: 0 is normal; a negative one goes first, clamped to what the GPU offers. The CPU library ignores it. */
MIMO_API int32_t mimo_stream_create(mimo_device* device, int32_t priority, mimo_stream** stream);
/* Waits for the stream's work first. */
MIMO_API int32_t mimo_stream_destroy(mimo_stream* stream);
/* Waits until all work queued on the stream is done; reports what failed in it. */
MIMO_API int32_t mimo_stream_synchronize(mimo_stream* stream);

/* How much of a stream's work was launched as CUDA graphs since mimo_stream_set_graphs turned them on. */
typedef struct mimo_graph_statistics {
  int64_t graphs;               /* graphs recorded */
  int64_t launches;             /* launches of those graphs */
  int64_t operations_in_graphs; /* operations that graphs launched */
  int64_t operations_alone;     /* operations launched one by one */
} mimo_graph_statistics;

/* wanted 1: operations are held back until an event, a collective or a copy to or from the host needs them queued, or 64 are
 * held. A run of operations that came before, with the same arguments and addresses, is launched as one CUDA graph. An error
 * of an operation may be returned by a later call. mimo_device_set_deterministic must be called earlier. 0 (default): each
 * operation is queued at once. The CPU library returns MIMO_ERROR_UNSUPPORTED for 1. */
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
