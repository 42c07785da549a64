/*
 * SHA-256 of consecutive ranges of a file while another thread writes it. Needs no device or stream; runs on threads of the
 * library.
 *
 *     mimo_digests_open(file, position of the first range, 1, &digests);
 *     mimo_digests_range(digests, bytes of the next range);       // before its bytes are announced
 *     mimo_digests_written(digests, bytes that the file has);     // as often as the writer likes
 *     mimo_digests_wait(digests, host_sums, 32 * ranges);         // all ranges must have been announced
 *     mimo_digests_close(digests);                                // at any time
 *
 * The file is read back, so that the digests describe its actual content. A thread hashes two ranges interleaved, which takes
 * little more time than one, because SHA-256's instructions on one range depend on each other.
 */
#pragma once

#include "library.h"

typedef struct mimo_digests mimo_digests;

/* file: a descriptor open for reading, which the calling program keeps open until mimo_digests_close. The first range begins
 * at byte `position`. Starts `threads` threads, at least 1. */
MIMO_API int32_t mimo_digests_open(int32_t file, int64_t position, int32_t threads, mimo_digests** digests);
/* Adds a range of `bytes` bytes, directly behind the last range. */
MIMO_API int32_t mimo_digests_range(mimo_digests* digests, int64_t bytes);
/* Announces that all bytes of the file below `position` are written. `position` never falls. */
MIMO_API int32_t mimo_digests_written(mimo_digests* digests, int64_t position);
/* Waits for the sums of all ranges, 32 bytes each, in the order of the ranges; sum_bytes = 32 * ranges. MIMO_ERROR_DATA: the
 * file cannot be read back. */
MIMO_API int32_t mimo_digests_wait(mimo_digests* digests, void* host_sums, int64_t sum_bytes);
/* Ends the threads, whether or not all ranges are done. */
MIMO_API int32_t mimo_digests_close(mimo_digests* digests);
