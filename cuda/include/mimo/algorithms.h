/*
 * Algorithms of vendor libraries: cuBLASLt and cuDNN offer several for a product or an attention, and guess which is fastest.
 * Their guess is taken unless a choice is given. The CPU library offers nothing, and ignores choices.
 *
 * A choice is a line: the call it is for, a tab, the algorithm; text behind another tab is ignored. Algorithms add in
 * different orders: a choice changes the last bits of results, but each choice repeats bit for bit.
 */
#pragma once

#include "stream.h"

/* Replaces all earlier choices. Work may be under way, but not work recorded in graphs. A choice that was made on another GPU
 * or vendor library is refused with MIMO_ERROR_UNSUPPORTED by the first operation that it is for. */
MIMO_API int32_t mimo_device_set_algorithms(mimo_device* device, const char* choices);
/* Times, on memory that it allocates, the algorithms of all products and attentions that were called since the device was
 * opened and have no choice. Other work on the GPU meanwhile falsifies the times. Operations take the fastest algorithms only
 * when they are given to mimo_device_set_algorithms. left_out: how many calls were not timed for want of memory. */
MIMO_API int32_t mimo_device_time_algorithms(mimo_device* device, mimo_stream* stream, int32_t* left_out);
/* The choices that were timed so far, each with three fields more: the microseconds of the choice, those of the vendor's own
 * guess, and how many algorithms were timed. `text` receives the first `capacity` bytes, without a zero at the end; `bytes`
 * the length of the whole text. */
MIMO_API int32_t mimo_device_timed_algorithms(mimo_device* device, char* text, int64_t capacity, int64_t* bytes);
