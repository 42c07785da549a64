/*
 * Algorithm selection in vendor libraries: cuBLASLt and cuDNN offer several algorithms for a product or an attention and
 * estimate which is fastest. Their estimate is used unless a choice is given. The CPU library has no algorithms and ignores
 * choices.
 *
 * A choice is a line: the call, a tab, the algorithm; text after another tab is ignored. Algorithms sum in different orders: a
 * choice changes the last bits of results, but each choice is reproducible.
 */
#pragma once

#include "stream.h"

/* Replaces all earlier choices. Work may be in flight, but not in recorded graphs. The first operation with a choice made on
 * another GPU or vendor library returns MIMO_ERROR_UNSUPPORTED. */
MIMO_API int32_t mimo_device_set_algorithms(mimo_device* device, const char* choices);
/* Times, on memory of its own, the algorithms of all products and attentions that were called since the device was opened and
 * have no choice. Other work on the GPU distorts the times. Operations use the fastest algorithms only after they are passed to
 * mimo_device_set_algorithms. left_out: number of calls not timed for lack of memory. */
MIMO_API int32_t mimo_device_time_algorithms(mimo_device* device, mimo_stream* stream, int32_t* left_out);
/* The choices timed so far, each with three more fields: microseconds of the choice, microseconds of the vendor's estimate, and
 * the number of algorithms timed. `text` receives the first `capacity` bytes, without a zero at the end; `bytes`
 * the length of the whole text. */
MIMO_API int32_t mimo_device_timed_algorithms(mimo_device* device, char* text, int64_t capacity, int64_t* bytes);
