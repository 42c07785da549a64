/* Which algorithm a vendor library takes for a product or an attention. */
#pragma once

#include "stream.h"

/* Vendor libraries offer several algorithms for a product or an attention, and guess which is fastest: that one is taken unless
 * a choice is given. Choices replace earlier ones. Work may be under way, but not work recorded in graphs. A choice is a line: the
 * call it is for, a tab, the algorithm; text behind another tab is ignored. Algorithms add in other orders, so that
 * choices change the last bits of results, but each repeats bit for bit. A choice for another GPU or vendor library is refused
 * with MIMO_ERROR_UNSUPPORTED by the first operation that meets it. The CPU library offers nothing and reads nothing. */
MIMO_API int32_t mimo_device_set_algorithms(mimo_device* device, const char* choices);
/* Times, on memory of its own, the algorithms of all products and attentions that were called since the device was opened and
 * have no choice. The GPU should have nothing else to do. Operations take the timed algorithms only after
 * mimo_device_set_algorithms. left_out: calls for which there was no memory. */
MIMO_API int32_t mimo_device_time_algorithms(mimo_device* device, mimo_stream* stream, int32_t* left_out);
/* The choices that were timed so far, with three fields more: microseconds of the choice, of the vendor's first answer, and the
 * number of algorithms timed. `text` gets the first `capacity` bytes, without a zero; bytes: of the whole. */
MIMO_API int32_t mimo_device_timed_algorithms(mimo_device* device, char* text, int64_t capacity, int64_t* bytes);
