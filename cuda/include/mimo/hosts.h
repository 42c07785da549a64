/*
 * Runs of several hosts. Each host has its own shared memory, and one of its processes runs a relay, which exchanges over TCP the
 * progress of ranks, the failure of the run, the states of ranks at that time, and identifiers of NCCL communicators. Tensors
 * move between hosts through NCCL only.
 */
#pragma once

#include "run.h"

/* Hosts are numbered in the order of their first ranks and form a tree: host h, above 0, is connected to host
 * (h - 1) / MIMO_HOST_FAN_OUT, its parent. */
#define MIMO_HOST_FAN_OUT 32

/* As mimo_run_create, on one of several hosts and not supervised. `host_of_rank` [ranks]: the index of each rank's host; rank 0 is
 * on host 0. `own_host`: the index of this process's host. */
MIMO_API int32_t mimo_run_create_part(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms,
                                      char* path, mimo_run** run);
/* This process runs the relay of its host from now on; once per process. On a host other than 0 it first connects to the parent's
 * relay at the numeric address `parent` and `parent_port`. MIMO_ERROR_PEER: the parent does not listen, does not prove that it
 * knows `key` (32 bytes), or has not accepted this host within 15 s because of unauthenticated connections. On a host with hosts
 * below, the relay listens at the numeric address `address` until all child hosts have connected; `port` receives the port, or 0
 * without hosts below. A child host must prove that it knows `key`, and every message carries an authentication tag. */
MIMO_API int32_t mimo_run_relay(mimo_run* run, const uint8_t* key, const char* parent, int32_t parent_port, const char* address,
                                int32_t* port);
/* Progress of all ranks of the run, a few tenths of a second old: how many have joined, how many have finished, and the last step
 * that every rank has finished. */
MIMO_API int32_t mimo_run_outlook(mimo_run* run, int64_t* joined, int64_t* finished, int64_t* step);
/* Numbers of messages that this process's relay has sent and received. */
MIMO_API int32_t mimo_run_relayed(mimo_run* run, int64_t* sent, int64_t* received);
/* After a failure: waits until the hosts have exchanged the states of their ranks, at most some seconds. */
MIMO_API int32_t mimo_run_settle(mimo_run* run);
