/* Devices: the CPU with its worker threads, or a GPU. */
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

/* Number of devices that this process can open: 1 for the CPU library; for the CUDA library 0 without a GPU or with too old a
 * driver. Opens no device. */
MIMO_API int32_t mimo_device_count(int32_t* count);
/* `index` is below mimo_device_count; 0 for the CPU library. threads: CPU worker threads, 0 = as many as the cores this
 * process may use; ignored on a GPU. MIMO_ERROR_UNSUPPORTED: a processor without AVX2, no GPU, a driver before 580, or a GPU
 * before sm_80. */
MIMO_API int32_t mimo_device_open(int32_t index, int32_t threads, mimo_device** device);
/* Its streams, events and groups must be destroyed before. Frees all memory of the device. */
MIMO_API int32_t mimo_device_close(mimo_device* device);
MIMO_API int32_t mimo_device_describe(mimo_device* device, mimo_device_info* info);
/* 1: bitwise reproducible results, at whatever cost. 0 (default): on CUDA the order of sums may vary in cuDNN's gradient of
 * bf16 attention and in NCCL's reductions. Call it before graphs are enabled and groups are created. The CPU library is always
 * reproducible. */
MIMO_API int32_t mimo_device_set_deterministic(mimo_device* device, int32_t deterministic);
