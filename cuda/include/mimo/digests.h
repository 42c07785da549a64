/*
 * SHA-256 of consecutive ranges of a file while another thread writes it: no device, no stream.
 *
 *     mimo_digests_open(file, position of the first range, 1, &digests);
 *     mimo_digests_range(digests, bytes of the next range);       // before its bytes are announced
 *     mimo_digests_written(digests, bytes that the file has);     // as often as the writer likes
 *     mimo_digests_wait(digests, host_sums, 32 * ranges);         // all ranges must have been announced
 *     mimo_digests_close(digests);                                // at any time
 *
 * Threads of the library read the file back, so the sums are of what it holds. A thread takes two ranges at a time: the
 * instructions of one stream wait for each other, those of two nearly double the rate.
 */
#pragma once

#include "library.h"

typedef struct mimo_digests mimo_digests;

/* file: a descriptor open for reading, which stays the caller's and open until close. The first range begins at byte
 * `position`. Starts `threads` threads. */
MIMO_API int32_t mimo_digests_open(int32_t file, int64_t position, int32_t threads, mimo_digests** digests);
/* The next range, behind the one before. */
MIMO_API int32_t mimo_digests_range(mimo_digests* digests, int64_t bytes);
/* The file's bytes below `position` are there; never less than was said before. */
MIMO_API int32_t mimo_digests_written(mimo_digests* digests, int64_t position);
/* Waits for the sums of all ranges, 32 bytes each in their order; sum_bytes = 32 * ranges. A file that cannot be read
 * back ends with MIMO_ERROR_DATA. */
MIMO_API int32_t mimo_digests_wait(mimo_digests* digests, void* host_sums, int64_t sum_bytes);
MIMO_API int32_t mimo_digests_close(mimo_digests* digests);
