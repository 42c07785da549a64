/* Device memory: a pool with statistics by purpose, and copies. */
#pragma once

#include "stream.h"

/* Purpose of a block of memory; statistics are kept by tag. */
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
  int64_t live_bytes;                  /* handed out and not freed */
  int64_t peak_bytes;                  /* highest live_bytes since the last reset */
  int64_t reserved_bytes;              /* taken from the system, live or cached */
  int64_t live_blocks;
  int64_t system_allocations;          /* calls to the system allocator so far */
  int64_t live_bytes_by_tag[MIMO_TAG_COUNT];
  int64_t peak_bytes_by_tag[MIMO_TAG_COUNT];
} mimo_memory_statistics;

/* Stream-ordered: the block may be used by work queued on `stream` from now on. 64-byte aligned at least; zero bytes
 * give a unique address. The block belongs to the pool of the stream's device. */
MIMO_API int32_t mimo_memory_allocate(mimo_stream* stream, int64_t bytes, int32_t tag, void** address);
/* The block may be reused by work queued on `stream` from now on. */
MIMO_API int32_t mimo_memory_free(mimo_stream* stream, void* address);
MIMO_API int32_t mimo_memory_statistics_get(mimo_device* device, mimo_memory_statistics* statistics);
MIMO_API int32_t mimo_memory_reset_peak(mimo_device* device);
/* Gives cached blocks back to the system. */
MIMO_API int32_t mimo_memory_trim(mimo_device* device);
/* Refuse to hold more than `bytes` live (0 = no limit): tests and plans of a smaller device. */
MIMO_API int32_t mimo_memory_limit(mimo_device* device, int64_t bytes);

/* Copies to the host are complete when they return; the source of one to the device may change then. */
MIMO_API int32_t mimo_memory_copy_to_device(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
MIMO_API int32_t mimo_memory_copy_to_host(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
MIMO_API int32_t mimo_memory_copy(mimo_stream* stream, void* destination, const void* source, int64_t bytes);
MIMO_API int32_t mimo_memory_set_zero(mimo_stream* stream, void* destination, int64_t bytes);
