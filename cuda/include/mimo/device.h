/* Devices: the processor with its threads, or a GPU. */
#pragma once

#include "library.h"

typedef struct mimo_device mimo_device;

typedef struct mimo_device_info {
  char name[128];          /* processor or GPU, zero terminated */
  char instructions[64];   /* "avx2", "avx512" or "sm_90" */
  int64_t memory_bytes;    /* physical memory of the device */
  int32_t threads;         /* worker threads (CPU) or multiprocessors (GPU) */
  int32_t device_count;    /* devices this library can open */
} mimo_device_info;

/* Devices this process could open; 0 without a GPU, or with too old a driver. Opens nothing. */
MIMO_API int32_t mimo_device_count(int32_t* count);
/* threads: CPU worker threads, 0 = one per core this process may use. Ignored on a GPU. */
MIMO_API int32_t mimo_device_open(int32_t index, int32_t threads, mimo_device** device);
MIMO_API int32_t mimo_device_close(mimo_device* device);
MIMO_API int32_t mimo_device_describe(mimo_device* device, mimo_device_info* info);
/* 1: results repeat bit for bit, whatever it costs. 0 (default): vendor libraries may add in any order; on CUDA that is
 * the gradient of bf16 attention, and NCCL's choice of algorithm. The CPU library always repeats. */
MIMO_API int32_t mimo_device_set_deterministic(mimo_device* device, int32_t deterministic);
