/* Runs whose ranks are on several hosts. Each host has shared memory of its own; one process of each host passes on
 * between them, over TCP, which ranks live, why the run has failed, where its ranks were then, and the identifiers that
 * they post to meet in NCCL. Tensors move through NCCL alone. */
#ifndef MIMO_HOSTS_H
#define MIMO_HOSTS_H

#include "mimo.h"

#ifdef __cplusplus
extern "C" {
#endif

/* By the process that made the run, before others open it: `host_of_rank` [ranks] is the index of the host that each rank is
 * on, rank 0's being 0; this process is on host `own_host`. */
MIMO_API int32_t mimo_run_place(mimo_run* run, const int32_t* host_of_rank, int32_t own_host);
/* On the host of rank 0: the other hosts meet this process at a numeric `address` of it and at `port`, which is returned. A
 * host that does not prove that it knows `key` (32 bytes) is turned away; every message of the others carries a tag. When all
 * hosts have come the port is closed. */
MIMO_API int32_t mimo_run_listen(mimo_run* run, const char* address, const uint8_t* key, int32_t* port);
/* On every other host: meets that process at a numeric `address`. Fails with MIMO_ERROR_PEER when it is not there, does not
 * prove that it knows `key`, or is kept by strangers from taking this host in for 15 s. */
MIMO_API int32_t mimo_run_connect(mimo_run* run, const char* address, int32_t port, const uint8_t* key);
/* After a failure: returns when the hosts have told each other where their ranks were, or do not within some seconds. */
MIMO_API int32_t mimo_run_settle(mimo_run* run);

#ifdef __cplusplus
}
#endif

#endif
