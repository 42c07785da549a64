/*
 * Runs whose ranks are on several hosts. Each host has shared memory of its own; one process of each host passes on
 * between them, over TCP, which ranks live, why the run has failed, where its ranks were then, and the identifiers that
 * they post to meet in NCCL. Tensors move through NCCL alone.
 */
#pragma once

#include "run.h"

/* Hosts are numbered in the order of their first ranks and form a tree: host h, above 0, is connected to host
 * (h - 1) / MIMO_HOST_FAN_OUT, its parent. */
#define MIMO_HOST_FAN_OUT 32

/* As mimo_run_create, for a host of several. `host_of_rank` [ranks] is the index of the host that each rank is on, rank 0's
 * being 0; this process is on host `own_host`. The ranks watch each other. */
MIMO_API int32_t mimo_run_create_part(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms,
                                      char* path, mimo_run** run);
/* This process passes on between its host and others from now on. A host other than rank 0's first meets its parent, at its
 * numeric address `parent` and at `parent_port`: it fails with MIMO_ERROR_PEER when the parent is not there, does not prove that
 * it knows `key` (32 bytes), or is kept by strangers from taking this host in for 15 s. A host with hosts below it listens at
 * its numeric `address`, at a `port` that is returned (0 without hosts below). A host that does not prove that it knows `key`
 * is turned away; every message of the others carries a tag. When all have come the port is closed. */
MIMO_API int32_t mimo_run_relay(mimo_run* run, const uint8_t* key, const char* parent, int32_t parent_port, const char* address,
                                int32_t* port);
/* How far the ranks of the whole run are, as of some beats ago: how many have joined and have finished, and the last step that
 * all have ended. */
MIMO_API int32_t mimo_run_outlook(mimo_run* run, int64_t* joined, int64_t* finished, int64_t* step);
/* Messages between hosts that this process has sent and received. */
MIMO_API int32_t mimo_run_relayed(mimo_run* run, int64_t* sent, int64_t* received);
/* After a failure: returns when the hosts have told each other where their ranks were, or do not within some seconds. */
MIMO_API int32_t mimo_run_settle(mimo_run* run);
