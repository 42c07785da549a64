/* Devices: the processor with its threads, or a GPU. */
#pragma once

#include "library.h"

typedef struct mimo_device mimo_device;

typedef struct mimo_device_info {
  char name[128];        /* processor or GPU, zero terminated */
  char instructions[64]; /* "avx2", "avx512" or "sm_90" */
  int64_t memory_bytes;  /* physical memory of the device */
  int32_t threads;       /* worker threads (CPU) or multiprocessors (GPU) */
  int32_t device_count;  /* devices this library can open */
} mimo_device_info;

/* How many devices this process can open: 1 for the CPU library; for the CUDA library 0 without a GPU or with too old a
 * driver. Opens nothing. */
MIMO_API int32_t mimo_device_count(int32_t* count);
/* `index` below mimo_device_count; the CPU library knows 0 alone. threads: CPU worker threads, 0 = as many as the cores this
 * process may use; ignored on a GPU. MIMO_ERROR_UNSUPPORTED: a processor without AVX2, no GPU, a driver before 580, or a GPU
 * before sm_80. */
MIMO_API int32_t mimo_device_open(int32_t index, int32_t threads, mimo_device** device);
/* After its streams, events and groups are destroyed. Frees all memory of the device. */
MIMO_API int32_t mimo_device_close(mimo_device* device);
MIMO_API int32_t mimo_device_describe(mimo_device* device, mimo_device_info* info);
/* 1: results repeat bit for bit, at whatever cost. 0 (default): on CUDA two vendor libraries may add in any order, cuDNN in
 * the gradient of bf16 attention and NCCL in reductions. To be called before graphs are turned on and groups are created.
 * Results of the CPU library always repeat. */
MIMO_API int32_t mimo_device_set_deterministic(mimo_device* device, int32_t deterministic);
