/*
 * mimo_backend.h - how the tensors of groups move between GPUs. Part of the ABI of mimo.h.
 */
#ifndef MIMO_BACKEND_H
#define MIMO_BACKEND_H

#include "mimo.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NCCL needs a GPU for each rank. Through the host's shared memory ranks may share GPUs; sums are then those of the CPU
 * library (in the order of the members, a NaN is the maximum of everything), and starting a call waits for the stream. */
enum mimo_backend { MIMO_BACKEND_NCCL = 0, MIMO_BACKEND_SHM = 1 };

/* For groups that this process makes from now on, on this device; all ranks say the same backend. The CPU library knows shared
 * memory alone, whatever it is told. */
MIMO_API int32_t mimo_run_set_backend(mimo_run* run, mimo_device* device, int32_t backend);

#ifdef __cplusplus
}
#endif
#endif
