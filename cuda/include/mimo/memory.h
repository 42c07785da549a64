/* Device memory: a pool for each device, with statistics by purpose, and copies. */
#pragma once

#include "stream.h"

/* Purpose of a block of memory; statistics are kept by tag. MIMO_TAG_COUNT is the number of tags. */
enum mimo_memory_tag {
  MIMO_TAG_PARAMETER = 0,
  MIMO_TAG_GRADIENT = 1,
  MIMO_TAG_OPTIMIZER = 2,
  MIMO_TAG_ACTIVATION = 3,
  MIMO_TAG_WORKSPACE = 4,
  MIMO_TAG_DATA = 5,
  MIMO_TAG_COMMUNICATION = 6,
  MIMO_TAG_COUNT = 7
};

typedef struct mimo_memory_statistics {
  int64_t live_bytes;         /* bytes requested and not freed */
  int64_t peak_bytes;         /* the highest live_bytes since mimo_memory_reset_peak */
  int64_t reserved_bytes;     /* bytes taken from the system: live blocks, rounded up, and cached ones */
  int64_t live_blocks;        /* blocks not freed */
  int64_t system_allocations; /* blocks taken from the system so far */
  int64_t live_bytes_by_tag[MIMO_TAG_COUNT];
  int64_t peak_bytes_by_tag[MIMO_TAG_COUNT]; /* each tag's own peak, at its own time */
} mimo_memory_statistics;

/* Allocates a block from the pool of the stream's device, for work queued on `stream` from now on. The address is a multiple
 * of 64, and unique even for 0 bytes; the content is undefined. MIMO_ERROR_OUT_OF_MEMORY names the bytes, the tag and the live
 * bytes. */
MIMO_API int32_t mimo_memory_allocate(mimo_stream* stream, int64_t bytes, int32_t tag, void** address);
/* Returns the block to the cache of `stream`, whose earlier work may still use it. */
MIMO_API int32_t mimo_memory_free(mimo_stream* stream, void* address);
MIMO_API int32_t mimo_memory_statistics_get(mimo_device* device, mimo_memory_statistics* statistics);
MIMO_API int32_t mimo_memory_reset_peak(mimo_device* device);
/* Returns the pool's cached blocks to the system. */
MIMO_API int32_t mimo_memory_trim(mimo_device* device);
/* Limits the live bytes of mimo_memory_allocate (0 = no limit): for tests, and to simulate a smaller device. */
MIMO_API int32_t mimo_memory_limit(mimo_device* device, int64_t bytes);

/* Copies and zero fill, in stream order. mimo_memory_copy_to_host returns when the copy is complete; after
 * mimo_memory_copy_to_device returns its source may change. Source and destination must not overlap. After the collectives of a
 * failed run were aborted, mimo_memory_copy_to_host of the CUDA library returns MIMO_ERROR_PEER. */
MIMO_API int32_t mimo_memory_copy_to_device(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
MIMO_API int32_t mimo_memory_copy_to_host(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
MIMO_API int32_t mimo_memory_copy(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
MIMO_API int32_t mimo_memory_set_zero(mimo_stream* stream, void* destination, int64_t bytes);

/* A block of the host's memory that copies read and write while both sides go on: page-locked in the CUDA library.
 * MIMO_ERROR_OUT_OF_MEMORY names the bytes. */
MIMO_API int32_t mimo_host_allocate(mimo_device* device, int64_t bytes, void** address);
/* No copy of the block is under way. */
MIMO_API int32_t mimo_host_free(mimo_device* device, void* address);
/* Copies between such a block and device memory, in stream order; may return before the copy is done. */
MIMO_API int32_t mimo_host_copy(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
